/* A read-only view of a folder that answers each open and each read after a while, through FUSE.
 *
 * FOLDER and DELAY_MS are variables of the environment. The kernel keeps what it has read, and
 * names and sizes, so that these cost nothing. */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const char *root;
static struct timespec delay;

/* The path in the folder, for use until the next call in this thread. */
static const char *real(const char *path) {
    static _Thread_local char whole[PATH_MAX];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    return whole;
}

static int get_attributes(const char *path, struct stat *stat, struct fuse_file_info *file) {
    (void)file;
    return lstat(real(path), stat) ? -errno : 0;
}

static int open_file(const char *path, struct fuse_file_info *file) {
    nanosleep(&delay, NULL);
    int descriptor = open(real(path), O_RDONLY | O_CLOEXEC);
    file->fh = (uint64_t)descriptor;
    return descriptor < 0 ? -errno : 0;
}

static int read_file(const char *path, char *to, size_t size, off_t begin,
                     struct fuse_file_info *file) {
    (void)path;
    nanosleep(&delay, NULL);
    ssize_t count = pread((int)file->fh, to, size, begin);
    return count < 0 ? -errno : (int)count;
}

static int close_file(const char *path, struct fuse_file_info *file) {
    (void)path;
    close((int)file->fh);
    return 0;
}

static int list_folder(const char *path, void *list, fuse_fill_dir_t add, off_t begin,
                       struct fuse_file_info *file, enum fuse_readdir_flags flags) {
    (void)begin, (void)file, (void)flags;
    DIR *folder = opendir(real(path));
    if (!folder)
        return -errno;
    for (struct dirent *entry; (entry = readdir(folder));)
        add(list, entry->d_name, NULL, 0, 0);
    closedir(folder);
    return 0;
}

static void *begin(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->max_background = connection->congestion_threshold = 1024;
    config->kernel_cache = 1;
    config->entry_timeout = config->attr_timeout = 1000;
    return NULL;
}

int main(int count, char **arguments) {
    static const struct fuse_operations operations = {
        .getattr = get_attributes, .open = open_file,       .read = read_file,
        .release = close_file,     .readdir = list_folder, .init = begin,
    };
    long us = (long)(atof(getenv("DELAY_MS")) * 1000);
    root = getenv("FOLDER");
    delay = (struct timespec){us / 1000000, us % 1000000 * 1000};
    return fuse_main(count, arguments, &operations, NULL);
}
