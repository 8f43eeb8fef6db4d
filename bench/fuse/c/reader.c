/* Reads one file and says how fast: the side of a FUSE bench that must not be its limit.
 *
 *   reader seq STREAMS FILE            each stream reads its share once, 1 MiB at a time
 *   reader rand STREAMS FILE READS     each stream reads 4 KiB READS times, anywhere
 *
 * Every stream opens the file itself, reads into warm memory (a huge page, where there are any:
 * the reader must not be the limit), and all begin together. Pages that the file has in the cache
 * are dropped before (`keep` as last word leaves them). Prints bytes, reads and seconds.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const size_t chunk_bytes = 1 << 20, page_bytes = 4096, huge_page_bytes = 2 << 20;
static const char *path;
static int streams, is_random;
static long reads_each;
static off_t length;
static pthread_barrier_t start;

struct stream {
    pthread_t thread;
    int index;
    uint64_t bytes, reads;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void take(struct stream *self, int fd, char *buffer, size_t size, off_t offset)
{
    ssize_t got = pread(fd, buffer, size, offset);
    if (got != (ssize_t)size)
        fail("short read");
    self->bytes += got;
    self->reads++;
}

static void *run(void *argument)
{
    struct stream *self = argument;
    uint64_t state = 0x9e3779b97f4a7c15ull * (self->index + 1);
    char *buffer = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fail(path);
    if (posix_memalign((void **)&buffer, huge_page_bytes, huge_page_bytes))
        exit(1);
    madvise(buffer, huge_page_bytes, MADV_HUGEPAGE); /* pinned at once, not page by page */
    memset(buffer, 1, huge_page_bytes);
    pthread_barrier_wait(&start);
    if (is_random) {
        for (long i = 0; i < reads_each; i++) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            take(self, fd, buffer, page_bytes, state % (length / page_bytes) * page_bytes);
        }
    } else {
        off_t at = length / chunk_bytes * self->index / streams * chunk_bytes;
        off_t end = length / chunk_bytes * (self->index + 1) / streams * chunk_bytes;
        for (; at < end; at += chunk_bytes)
            take(self, fd, buffer, chunk_bytes, at);
    }
    close(fd);
    free(buffer);
    return NULL;
}

int main(int argc, char **argv)
{
    struct stat st;
    struct stream *all;
    uint64_t bytes = 0, reads = 0;
    double began;
    int fd;
    is_random = argc > 1 && !strcmp(argv[1], "rand");
    if (argc < 4 + is_random)
        return 2;
    streams = atoi(argv[2]);
    path = argv[3];
    reads_each = is_random ? atol(argv[4]) : 0;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st))
        fail(path);
    length = st.st_size;
    if (strcmp(argv[argc - 1], "keep") && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
        fail("posix_fadvise");
    all = calloc(streams, sizeof *all);
    pthread_barrier_init(&start, NULL, streams + 1);
    for (int i = 0; i < streams; i++) {
        all[i].index = i;
        if (pthread_create(&all[i].thread, NULL, run, &all[i]))
            exit(1);
    }
    pthread_barrier_wait(&start);
    began = now();
    for (int i = 0; i < streams; i++) {
        pthread_join(all[i].thread, NULL);
        bytes += all[i].bytes;
        reads += all[i].reads;
    }
    printf("%llu %llu %.9f\n", (unsigned long long)bytes, (unsigned long long)reads,
           now() - began);
    close(fd);
    return 0;
}
