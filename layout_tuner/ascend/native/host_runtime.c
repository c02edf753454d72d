/* What a natively built kernel calls: memory for its intermediate arrays, and copies between strided arrays.

   Memory is never given back one piece at a time: `scratch_reset` ends a program. Every piece is filled with 0xFF
   bytes, a NaN in every float type, so that a value read before it was written shows. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RESERVED ((size_t)1 << 36)

static __thread char *scratch;
static __thread size_t used;

void *scratch_malloc(size_t size) {
  if (!scratch) {
    /* Address space only: pages are taken when they are written. */
    scratch = mmap(0, RESERVED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (scratch == MAP_FAILED) {
      perror("scratch memory");
      abort();
    }
  }
  used = (used + 63) & ~(size_t)63;
  if (used + size > RESERVED) {
    fprintf(stderr, "scratch memory: more than %zu bytes\n", RESERVED);
    abort();
  }
  void *piece = scratch + used;
  used += size;
  return memset(piece, 0xFF, size);
}

void scratch_free(void *piece) { (void)piece; }

void scratch_reset(void) { used = 0; }

/* MLIR's runtime calls this for copies that its compiler does not expand. */

typedef struct {
  char *allocated;
  char *aligned;
  int64_t offset;
  int64_t sizes_then_strides[];
} Descriptor;

typedef struct {
  int64_t rank;
  Descriptor *descriptor;
} Unranked;

static void copy(int64_t bytes, int64_t rank, const int64_t *sizes, const char *from, const int64_t *from_strides,
                 char *to, const int64_t *to_strides) {
  if (rank == 0) {
    memcpy(to, from, bytes);
  } else if (rank == 1 && from_strides[0] == 1 && to_strides[0] == 1) {
    memcpy(to, from, bytes * sizes[0]);
  } else {
    for (int64_t i = 0; i < sizes[0]; i++)
      copy(bytes, rank - 1, sizes + 1, from + i * from_strides[0] * bytes, from_strides + 1,
           to + i * to_strides[0] * bytes, to_strides + 1);
  }
}

void memrefCopy(int64_t bytes, Unranked *from, Unranked *to) {
  int64_t rank = from->rank;
  const Descriptor *a = from->descriptor, *b = to->descriptor;
  for (int64_t i = 0; i < rank; i++)
    if (a->sizes_then_strides[i] <= 0) return;
  copy(bytes, rank, a->sizes_then_strides, a->aligned + a->offset * bytes, a->sizes_then_strides + rank,
       b->aligned + b->offset * bytes, b->sizes_then_strides + rank);
}
