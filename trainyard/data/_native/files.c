/* Files: read whole or by spans, and hinted at. */
#define _GNU_SOURCE /* POSIX, syscall, RWF_NOWAIT */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 8
#endif

#define OTHER_LENGTH (-1) /* in place of an errno */

static bool lies_inside(int64_t begin, int64_t length, int64_t size) {
    return begin >= 0 && length >= 0 && begin <= size && length <= size - begin;
}

bool files_fit(const FilesToRead *files) {
    for (int64_t i = 0; i < files->count; i++) {
        int64_t begin = files->begins[i], end = files->ends[i];
        if (begin < 0 || end < begin || end > files->names_size ||
            !lies_inside(files->offsets[i], files->lengths[i], files->out_size))
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

static int read_named(int folder, const uint8_t *name, size_t length, uint8_t *to, int64_t size) {
    char path[PATH_MAX]; /* the name with a zero behind it */
    if (length >= sizeof path)
        return ENAMETOOLONG;
    if (memchr(name, 0, length))
        return EINVAL;
    memcpy(path, name, length);
    path[length] = 0;
    int file = openat(folder, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe does not block */
    if (file < 0)
        return errno;
    int error = read_whole(file, to, size);
    close(file);
    return error;
}

void read_files(const FilesToRead *files) {
    /* Without a root the names are absolute, or relative to the working directory. */
    bool has_root = files->root[0] != 0;
    int folder = has_root ? open(files->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : AT_FDCWD;
    int error = has_root && folder < 0 ? errno : 0;
    for (int64_t i = 0; i < files->count; i++) {
        size_t length = (size_t)(files->ends[i] - files->begins[i]);
        files->errors[i] = error ? error
                                 : read_named(folder, files->names + files->begins[i], length,
                                              files->out + files->offsets[i], files->lengths[i]);
    }
    if (has_root && folder >= 0)
        close(folder);
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
