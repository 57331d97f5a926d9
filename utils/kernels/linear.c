/* Quantises rows, multiplies them with weights of any type, and reads rows of a packed weight. */
#include "internal.h"

/* 16 columns of `rows` rows, from the input's row `first` on, which begins a tile. */
void columns(const Weight *weight, int64_t block, const Input *input, int64_t first, int64_t rows, float *y,
             int64_t stride, int64_t narrow) {
    if (!SHAPES[weight->type].low) {
        float_columns(weight, block, input->floats + first * weight->width, y, stride, rows);
    } else {
        const int64_t groups = weight->width / GROUP;
        const uint8_t *data = weight->data + block * block_bytes(weight->type, weight->width);
        const Tile tile = narrow ? NARROW_TILES[weight->type] : TILES[weight->type];
        for (int64_t row = 0; row < rows; row += TILE) {
            int now = rows - row < TILE ? (int)(rows - row) : TILE;
            tile(data, input->codes + (first + row) * groups, y + row * stride, groups, stride, now);
        }
    }
    if (!weight->bias) return;
    const int64_t left = weight->rows - COLUMNS * block;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < COLUMNS && at < left; at++) y[row * stride + at] += weight->bias[COLUMNS * block + at];
}

/* Every result has two sums, of the even and of the odd numbers: the order of additions does not depend on the number
   of rows. FLOAT_ROWS rows fit into the registers. */
#if defined(__AVX512F__)
#define HELD(x) __asm__("" : "+v"(x)) /* in a register: else it is loaded again for every row */
enum { CHAINS = 2, FLOAT_ROWS = 8 };
#define BY_ROWS(action, type) action(type, 1) action(type, 2) action(type, 3) action(type, 4) \
    action(type, 5) action(type, 6) action(type, 7) action(type, 8)
#else
#define HELD(x) (void)(x)
enum { CHAINS = 2, FLOAT_ROWS = 2 };
#define BY_ROWS(action, type) action(type, 1) action(type, 2)
#endif

INLINE Reals float_line(enum Type type, const uint8_t *data, int64_t at) {
    if (type == F32) return load((const float *)data + COLUMNS * at);
    if (type == F16) return load_half((const _Float16 *)data + COLUMNS * at);
    typedef uint16_t Short16 __attribute__((vector_size(32)));
    Short16 x;
    memcpy(&x, (const uint16_t *)data + COLUMNS * at, sizeof x);
    return reals_of(__builtin_convertvector(x, Bits) << 16);
}

INLINE void float_tile(enum Type type, const uint8_t *data, const float *x, float *y, int64_t width, int64_t stride,
                       int rows) {
    Reals sums[FLOAT_ROWS][CHAINS] = {{{0}}};
    int64_t at = 0;
    for (; at + CHAINS <= width; at += CHAINS) {
        const int line = SHAPES[type].file_bytes * COLUMNS;
        fetch_ahead(data + line * at, CHAINS * line);
        for (int chain = 0; chain < CHAINS; chain++) {
            Reals line = float_line(type, data, at + chain);
            HELD(line);
            for (int row = 0; row < rows; row++)
                sums[row][chain] = fma16(line, splat(x[row * width + at + chain]), sums[row][chain]);
        }
    }
    for (; at < width; at++)
        for (int row = 0; row < rows; row++)
            sums[row][0] = fma16(float_line(type, data, at), splat(x[row * width + at]), sums[row][0]);
    for (int row = 0; row < rows; row++) store(y + row * stride, sums[row][0] + sums[row][1]);
}

#define FLOAT_CASE(type, count) \
    case FLOAT_ROWS * type + count: float_tile(type, data, x, y, weight->width, stride, count); break;

void float_columns(const Weight *weight, int64_t block, const float *x, float *y, int64_t stride, int64_t rows) {
    const uint8_t *data = weight->data + block * block_bytes(weight->type, weight->width);
    for (int64_t first = 0; first < rows; first += FLOAT_ROWS, x += FLOAT_ROWS * weight->width, y += FLOAT_ROWS * stride) {
        const int now = rows - first < FLOAT_ROWS ? (int)(rows - first) : FLOAT_ROWS;
        switch (FLOAT_ROWS * weight->type + now) {
            BY_ROWS(FLOAT_CASE, F32) BY_ROWS(FLOAT_CASE, F16) BY_ROWS(FLOAT_CASE, BF16)
        }
    }
}

/* -- one layer ----------------------------------------------------------------------------------------------------- */

void work_product(void *record, Member *member) {
    const Product *p = record;
    const int64_t width = p->weight.width, groups = width / GROUP, blocks = blocks_of(p->weight.rows);
    Input input = p->input;
    if (SHAPES[p->weight.type].low) {
        Share rows = share(p->count, member);
        for (int64_t row = rows.first; row < rows.last; row++)
            for (int64_t group = 0; group < groups; group++) {
                const float *x = p->x + row * width + GROUP * group;
                put(&input, row, p->count, group, groups, load(x), load(x + WIDTH), p->narrow);
            }
        meet(member);
    } else {
        input.floats = (float *)p->x;
    }
    Share mine = share(blocks, member);
    for (int64_t block = mine.first; block < mine.last; block++)
        columns(&p->weight, block, &input, 0, p->count, p->y + COLUMNS * block, COLUMNS * blocks, p->narrow);
}

void work_look_up(void *record, Member *member) {
    const LookUp *p = record;
    Share rows = share(p->count, member);
    for (int64_t row = rows.first; row < rows.last; row++)
        read_row(&p->weight, p->ids[row], p->y + row * p->weight.width);
}
