/* Reads cases of products from standard input and writes their results: what pytest compares natively, under sanitizers
   and on another processor (tests/utils/kernels/test_driver.py).

   A case: six int64 (type, rows of the weight, width, rows of x, narrow, threads), the weight's bytes as in a file, x in
   float32. A result: y [rows of x][rows of the weight rounded up to 16], then the weight's rows in float32.

   A pass is six int64 too (-1, blocks, links, results, threads, 0), then the blocks of memory that its record (the first
   one) leads to, each a size and its bytes; the links, each block, offset and the block whose address stands there; the
   blocks that are its results. Each block is memory of its own, so that a sanitizer sees its ends.

   Six int64 that begin with -2 (then: how many, and four zeros) are runs of two threads, each after a pause of about the
   time after which the second one falls asleep.

   A draw is six int64 (-3, logits, top-k, the state of the noise, 0, 0), four floats (1 / temperature, top-p, min-p, 0)
   and the logits; its result is the drawn id, int64. */
#define _POSIX_C_SOURCE 200809L
#include "internal.h"
#include <stdio.h>
#include <stdlib.h>

static void *room(size_t size) {
    void *memory = malloc(size ? size : 1);
    if (!memory) exit(2);
    return memory;
}

static int read_all(void *to, size_t size) { return fread(to, 1, size, stdin) == size; }

enum { BLOCKS = 4096 };

static int pass(const int64_t *given) {
    static uint8_t *blocks[BLOCKS];
    static int64_t sizes[BLOCKS];
    int64_t link[3], result;
    if (given[1] > BLOCKS) return 0;
    for (int64_t at = 0; at < given[1]; at++) {
        if (!read_all(&sizes[at], sizeof sizes[at])) return 0;
        if (posix_memalign((void **)&blocks[at], 64, (size_t)(sizes[at] ? sizes[at] : 1))) return 0;
        if (!read_all(blocks[at], (size_t)sizes[at])) return 0;
    }
    for (int64_t at = 0; at < given[2]; at++) {
        if (!read_all(link, sizeof link)) return 0;
        memcpy(blocks[link[0]] + link[1], &blocks[link[2]], sizeof(uint8_t *));
    }
    run(PASS, blocks[0], given[4]);
    for (int64_t at = 0; at < given[3]; at++) {
        if (!read_all(&result, sizeof result)) return 0;
        fwrite(blocks[result], 1, (size_t)sizes[result], stdout);
    }
    for (int64_t at = 0; at < given[1]; at++) free(blocks[at]);
    return 1;
}

/* The team's own patience is 10,000 pauses. */
static void rouse(int64_t runs) {
    LookUp nothing = {0};
    unsigned chance = 1;
    for (; runs; runs--) {
        chance = chance * 1664525u + 1013904223u;
        for (unsigned pauses = 8000 + (chance >> 8) % 8000; pauses; pauses--)
#if defined(__aarch64__)
            __asm__ volatile("yield");
#else
            __builtin_ia32_pause();
#endif
        run(LOOK_UP, &nothing, 2);
    }
}

static int draw(const int64_t *given) {
    Walk one = {0};
    float numbers[4], *logits;
    if (posix_memalign((void **)&logits, 64, sizeof(float) * (size_t)given[1])) return 0;
    if (!read_all(numbers, sizeof numbers) || !read_all(logits, sizeof(float) * (size_t)given[1])) return 0;
    one.logits = logits, one.count = given[1], one.most = 4, one.draws = 1, one.state = (uint64_t)given[3];
    one.inverse = numbers[0], one.top_k = given[2], one.top_p = numbers[1], one.min_p = numbers[2];
    walk(&one);
    fwrite(&one.drawn, sizeof one.drawn, 1, stdout);
    free(logits);
    return 1;
}

int main(void) {
    int64_t given[6];
    while (read_all(given, sizeof given)) {
        if (given[0] == -2) {
            rouse(given[1]);
            continue;
        }
        if (given[0] == -3) {
            if (!draw(given)) return 1;
            continue;
        }
        if (given[0] < 0) {
            if (!pass(given)) return 1;
            continue;
        }
        const int64_t type = given[0], rows = given[1], width = given[2], count = given[3];
        const int64_t wide = blocks_of(rows) * COLUMNS;
        const size_t bytes = (size_t)(rows * (width / SHAPES[type].file_codes) * SHAPES[type].file_bytes);
        uint8_t *file = room(bytes), *data = room((size_t)packed_size(type, rows, width));
        float *x = room(sizeof(float) * (size_t)(count * width)), *y = room(sizeof(float) * (size_t)(count * wide));
        float *dense = room(sizeof(float) * (size_t)(rows * width));
        int64_t *ids = room(sizeof(int64_t) * (size_t)rows);
        if (!read_all(file, bytes) || !read_all(x, sizeof(float) * (size_t)(count * width))) return 1;
        pack(type, file, rows, width, data, 0, blocks_of(rows));
        for (int64_t row = 0; row < rows; row++) ids[row] = row;
        Weight weight = {data, type, rows, width, 0};
        Codes *codes = SHAPES[type].low ? room(sizeof(Codes) * (size_t)(count * width / GROUP)) : 0;
        Product product = {weight, count, given[4], x, y, {codes, 0}};
        run(PRODUCT, &product, given[5]);
        LookUp look_up = {weight, rows, ids, dense};
        run(LOOK_UP, &look_up, given[5]);
        fwrite(y, sizeof(float), (size_t)(count * wide), stdout);
        fwrite(dense, sizeof(float), (size_t)(rows * width), stdout);
        free(file), free(data), free(x), free(y), free(dense), free(ids), free(codes);
    }
    return 0;
}
