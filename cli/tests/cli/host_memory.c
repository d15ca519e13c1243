/* Before the C library: the n-th call of one kind fails, of which FAIL_KIND and FAIL_AT tell. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static long allocations = -1, mappings = -1, threads = -1;

__attribute__((constructor)) static void begin(void) {
  const char *kind = getenv("FAIL_KIND"), *at = getenv("FAIL_AT");
  if (!kind || !at) return;
  *(!strcmp(kind, "allocation") ? &allocations : !strcmp(kind, "mapping") ? &mappings : &threads) = atol(at);
}

static int fails(long *left) { return __atomic_sub_fetch(left, 1, __ATOMIC_RELAXED) == 0; }

void *malloc(size_t n) { return fails(&allocations) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails(&allocations) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails(&allocations) ? NULL : __libc_realloc(p, n); }
int posix_memalign(void **p, size_t align, size_t n) {
  if (fails(&allocations)) return ENOMEM;
  *p = __libc_memalign(align, n);
  return *p ? 0 : ENOMEM;
}

void *mmap(void *at, size_t n, int protection, int flags, int file, off_t offset) {
  if (!fails(&mappings)) return (void *)syscall(SYS_mmap, at, n, protection, flags, file, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}
void *mmap64(void *at, size_t n, int protection, int flags, int file, off_t offset) {
  return mmap(at, n, protection, flags, file, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *with, void *(*run)(void *), void *arg) {
  static int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  if (fails(&threads)) return EAGAIN;
  if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
  return next(thread, with, run, arg);
}
