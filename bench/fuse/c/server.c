/* One file served by libfuse 3's low-level interface: the peer that a FUSE server is held to.
 *
 *   server MODE DIRECT THREADS CLONE FILE MOUNTPOINT
 *
 * MODE pread: each reply is read into the thread's own buffer; mmap: it is a slice of a map of
 * the file, whose pages are all touched before mounting. Both answer by fuse_reply_buf. DIRECT
 * is 0 or 1. The one file is called "data".
 */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int fd, mapped, direct_io;
static off_t length;
static const char *map;
static const unsigned request_bytes = 1 << 20;

static int fill(fuse_ino_t ino, struct stat *st)
{
    memset(st, 0, sizeof *st);
    st->st_ino = ino;
    st->st_mode = ino == 1 ? S_IFDIR | 0755 : S_IFREG | 0444;
    st->st_nlink = ino == 1 ? 2 : 1;
    st->st_size = ino == 2 ? length : 0;
    return ino == 1 || ino == 2 ? 0 : ENOENT;
}

static void on_init(void *user, struct fuse_conn_info *conn)
{
    (void)user;
    conn->max_write = request_bytes; /* libfuse derives the pages of a request from it */
    conn->max_background = 64;
    conn->want &= ~(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry = {.ino = 2, .attr_timeout = 60, .entry_timeout = 60};
    if (parent != 1 || strcmp(name, "data"))
        fuse_reply_err(req, ENOENT);
    else {
        fill(2, &entry.attr);
        fuse_reply_entry(req, &entry);
    }
}

static void on_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct stat st;
    int error = fill(ino, &st);
    (void)info;
    if (error)
        fuse_reply_err(req, error);
    else
        fuse_reply_attr(req, &st, 60);
}

static void on_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    (void)ino;
    info->direct_io = direct_io;
    info->keep_cache = 1;
    info->noflush = 1;
    fuse_reply_open(req, info);
}

static void on_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *info)
{
    static __thread char *buffer;
    ssize_t got;
    (void)ino, (void)info;
    if (mapped) {
        size_t left = offset < length ? length - offset : 0;
        fuse_reply_buf(req, map + offset, left < size ? left : size);
        return;
    }
    if (!buffer && posix_memalign((void **)&buffer, 4096, request_bytes)) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    got = pread(fd, buffer, size < request_bytes ? size : request_bytes, offset);
    if (got < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_buf(req, buffer, got);
}

static const struct fuse_lowlevel_ops operations = {
    .init = on_init,
    .lookup = on_lookup,
    .getattr = on_getattr,
    .open = on_open,
    .read = on_read,
};

int main(int argc, char **argv)
{
    char *words[] = {argv[0], "-o", "ro,allow_other,default_permissions,fsname=bench", NULL};
    struct fuse_args args = FUSE_ARGS_INIT(3, words);
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    struct fuse_session *session;
    struct stat st;
    int threads, status;
    if (argc != 7) {
        fprintf(stderr, "usage: server pread|mmap DIRECT THREADS CLONE FILE MOUNTPOINT\n");
        return 2;
    }
    mapped = !strcmp(argv[1], "mmap");
    direct_io = atoi(argv[2]);
    threads = atoi(argv[3]);
    fd = open(argv[5], O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) {
        perror(argv[5]);
        return 1;
    }
    length = st.st_size;
    if (mapped) {
        map = mmap(NULL, length, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (map == MAP_FAILED) {
            perror("mmap");
            return 1;
        }
    }
    session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, argv[6]))
        return 1;
    fuse_loop_cfg_set_clone_fd(config, atoi(argv[4]));
    fuse_loop_cfg_set_max_threads(config, threads);
    fuse_loop_cfg_set_idle_threads(config, threads);
    status = threads == 1 ? fuse_session_loop(session) : fuse_session_loop_mt(session, config);
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    fuse_loop_cfg_destroy(config);
    return status != 0;
}
