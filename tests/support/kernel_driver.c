/* Reads cases of products from standard input and writes their results: what pytest compares natively, under sanitizers
   and on another processor (tests/utils/kernels/test_driver.py).

   A case: six int64 (type, rows of the weight, width, rows of x, narrow, threads), the weight's bytes as in a file, x in
   float32. A result: y [rows of x][rows of the weight rounded up to 16], then the weight's rows in float32. */
#include "internal.h"
#include <stdio.h>
#include <stdlib.h>

static void *room(size_t size) {
    void *memory = malloc(size ? size : 1);
    if (!memory) exit(2);
    return memory;
}

static int read_all(void *to, size_t size) { return fread(to, 1, size, stdin) == size; }

int main(void) {
    int64_t given[6];
    while (read_all(given, sizeof given)) {
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
