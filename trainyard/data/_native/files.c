/* Files: read whole, hinted at, and what happens when a mapped one cannot be read. */
#define _GNU_SOURCE /* madvise, POSIX, BUS_MCEERR_AR, RUSAGE_THREAD */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifndef RUSAGE_THREAD /* macOS: faults of other threads count too, so less seems to be in memory */
#define RUSAGE_THREAD RUSAGE_SELF
#endif
#ifndef BUS_MCEERR_AR
#define BUS_MCEERR_AR BUS_ADRERR
#endif

/* --- read whole --- */

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

/* All of an open file, which has `size` bytes; 0, or why not.

   Whether it ends there is found by reading on: fstat would need glibc 2.33. */
static int read_whole(int file, uint8_t *to, int64_t size) {
    uint8_t beyond; /* a byte that should not be there */
    int64_t done = 0;
    for (;;) {
        int64_t rest = size - done; /* 2 GiB at a time */
        ssize_t count = read(file, rest ? to + done : &beyond, rest ? (size_t)rest : 1);
        if (count < 0 && errno != EINTR)
            return errno;
        if (count == 0 || (count > 0 && rest == 0))
            return count == 0 && rest == 0 ? 0 : OTHER_LENGTH;
        done += count > 0 ? count : 0;
    }
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

/* --- hints --- */

void will_need(const uint8_t *bytes, size_t size) {
    long page = sysconf(_SC_PAGESIZE);
    if (page <= 0 || size == 0)
        return;
    size_t before = (size_t)bytes % (size_t)page;
    /* A hint: where it cannot be taken, nothing is lost. */
    (void)madvise((void *)(bytes - before), size + before, MADV_WILLNEED);
}

/* --- bus errors --- */

static _Thread_local BusGuard *innermost;

void bus_guard_set(BusGuard *guard) {
    guard->outer = innermost;
    innermost = guard;
}

void bus_guard_release(const BusGuard *guard) { innermost = guard->outer; }

/* The kernel sends SIGBUS to the thread that touched a page which its file no longer has. */
static void on_bus_error(int number, siginfo_t *about, void *context) {
    (void)context;
    bool is_of_this_instruction = about->si_code == BUS_ADRERR || about->si_code == BUS_MCEERR_AR;
    if (is_of_this_instruction && innermost)
        siglongjmp(innermost->back, 1);
    signal(number, SIG_DFL); /* the instruction is tried again, and ends the process */
    if (!is_of_this_instruction)
        raise(number);
}

bool guard_bus_errors(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, NULL) == 0;
}

static __attribute__((noinline)) void touch(const uint8_t *byte) {
    BusGuard guard;
    bus_guard_set(&guard);
    if (sigsetjmp(guard.back, 0) == 0)
        (void)*(const volatile uint8_t *)byte;
    bus_guard_release(&guard);
}

bool was_in_memory(const uint8_t *byte) {
    struct rusage before, after;
    if (getrusage(RUSAGE_THREAD, &before) < 0)
        return true;
    touch(byte);
    return getrusage(RUSAGE_THREAD, &after) < 0 || after.ru_majflt == before.ru_majflt;
}
