/* Files: read whole or by spans, and hinted at. */
#define _GNU_SOURCE /* POSIX, syscall, RWF_NOWAIT */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 8
#endif

#define OTHER_LENGTH (-1) /* in place of an errno */

static bool lies_inside(int64_t begin, int64_t length, int64_t size) {
    return begin >= 0 && length >= 0 && begin <= size && length <= size - begin;
}

bool spans_fit(const SpansToRead *spans) {
    for (int64_t i = 0; i < spans->count; i++) {
        int64_t begin = spans->begins[i], end = spans->ends[i];
        if (begin < 0 || end < begin || end > spans->names_size ||
            !lies_inside(spans->offsets[i], spans->lengths[i], spans->out_size))
            return false;
    }
    return true;
}

int read_span(int file, uint8_t *to, int64_t size, int64_t begin) {
    for (int64_t done = 0; done < size;) { /* 2 GiB at a time */
        ssize_t count = pread(file, to + done, (size_t)(size - done), begin + done);
        if (count < 0 && errno != EINTR)
            return errno;
        if (count == 0)
            return OTHER_LENGTH;
        done += count > 0 ? count : 0;
    }
    return 0;
}

/* All of an open file, which has `size` bytes; 0, or why not.

   Whether it ends there is found by reading on: fstat would need glibc 2.33. */
static int read_whole(int file, uint8_t *to, int64_t size) {
    uint8_t beyond; /* a byte that should not be there */
    int error = read_span(file, to, size, 0);
    if (error)
        return error;
    int end = read_span(file, &beyond, 1, size);
    return end == OTHER_LENGTH ? 0 : end ? end : OTHER_LENGTH;
}

/* A file by its name in a folder; below 0: minus an errno. */
static int open_named(int folder, const uint8_t *name, size_t length) {
    char path[PATH_MAX]; /* the name with a zero behind it */
    if (length >= sizeof path)
        return -ENAMETOOLONG;
    if (memchr(name, 0, length))
        return -EINVAL;
    memcpy(path, name, length);
    path[length] = 0;
    int file = openat(folder, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe does not block */
    return file < 0 ? -errno : file;
}

static int read_one(const SpansToRead *spans, int64_t i, int folder) {
    bool is_whole = spans->starts[i] < 0;
    int file = spans->files[i];
    if (file < 0)
        file = open_named(folder, spans->names + spans->begins[i],
                          (size_t)(spans->ends[i] - spans->begins[i]));
    if (file < 0)
        return -file;
    uint8_t *to = spans->out + spans->offsets[i];
    int error = is_whole ? read_whole(file, to, spans->lengths[i])
                         : read_span(file, to, spans->lengths[i], spans->starts[i]);
    if (spans->files[i] < 0) {
        if (is_whole || error)
            close(file);
        else
            spans->files[i] = file;
    }
    return error;
}

/* How often this thread has waited; a thread that others push off the processor does not. */
static long num_waits(void) {
#ifdef RUSAGE_THREAD /* not on macOS */
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nvcsw;
#else
    return 0;
#endif
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double read_spans(const SpansToRead *spans) {
    /* Without a root the names are absolute, or relative to the working directory. */
    bool has_root = spans->root[0] != 0;
    int folder = has_root ? open(spans->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : AT_FDCWD;
    int error = has_root && folder < 0 ? errno : 0;
    double waited = 0, before = now();
    long waits = num_waits();
    for (int64_t i = 0; i < spans->count; i++) {
        spans->errors[i] = error ? error : read_one(spans, i, folder);
        double after = now();
        long more = num_waits();
        waited += more > waits ? after - before : 0;
        before = after;
        waits = more;
    }
    if (has_root && folder >= 0)
        close(folder);
    return waited;
}

/* Whether a byte can be read without waiting for the storage; false where the system cannot say. */
static bool is_in_memory(int file, int64_t at) {
#ifdef SYS_preadv2 /* not on macOS; its function would need glibc 2.26 */
    uint8_t byte;
    struct iovec to = {&byte, 1};
    return syscall(SYS_preadv2, file, &to, 1, at, 0, RWF_NOWAIT) >= 0;
#else
    (void)file, (void)at;
    return false;
#endif
}

bool will_need(int file, int64_t size, int64_t begin) {
    /* For what is in memory the request takes six times as long as this question. */
    if (size <= 0 || is_in_memory(file, begin + size / 2))
        return true;
#ifdef POSIX_FADV_WILLNEED /* not on macOS; where it fails, nothing is lost */
    (void)posix_fadvise(file, begin, size, POSIX_FADV_WILLNEED);
#endif
    return false;
}
