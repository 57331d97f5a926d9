/* Declarations that the kernels' files share. */
#ifndef INTERNAL_H
#define INTERNAL_H
#include "kernels.h"
#include "vectors.h"

/* Prefetch weights, 10 KB ahead of the `bytes` in use, into the second level of caches (2). Past the caches (0) Intel's
   server processors read at a quarter of their speed: docs/notes/passes.md. */
INLINE void fetch_ahead(const uint8_t *used, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(used + 10240 + at, 0, 2);
}

/* A row of the types of weights in kernels.h; size: bytes of a group with its lines. */
typedef struct {
    int low, high, bits;  /* bits of a code: in the low lines, in the high ones, as a product takes them */
    int bias;             /* added to each code, so that none is negative */
    int scales, minimum;  /* scales of a group: one or two; whether there are minimums */
    int head, size;       /* bytes of a group before its lines, and in all */
    int header, groups;   /* bytes before a block's groups, and how many there are */
    int nonlinear;        /* codes stand for the numbers of a table */
    int file_codes, file_bytes;
} Shape;

#define LAYOUT(name, low, high, bits, bias, scales, minimum, head, ...) \
    [name] = {low, high, bits, bias, scales, minimum, head, head + 64 * (low + high), __VA_ARGS__},
static const Shape SHAPES[TYPES] = {BLOCK_TYPES(LAYOUT) FLOAT_TYPES(LAYOUT)};
static const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Bytes of 16 columns of a weight. */
INLINE int64_t block_bytes(int64_t type, int64_t width) {
    const Shape *shape = &SHAPES[type];
    if (!shape->low) return COLUMNS * width * shape->file_bytes;
    return width / (GROUP * shape->groups) * (shape->header + shape->groups * shape->size);
}
INLINE int64_t blocks_of(int64_t rows) { return (rows + COLUMNS - 1) / COLUMNS; }

/* -- threads (team.c) -- */

typedef struct Meeting Meeting;
typedef struct {
    int64_t thread, threads, turn; /* turn: barriers that it has come to */
    Meeting *meeting;
} Member;
typedef struct {
    int64_t first, last;
} Share;

void meet(Member *member);
INLINE Share share(int64_t count, const Member *member) {
    return (Share){count * member->thread / member->threads, count * (member->thread + 1) / member->threads};
}

/* -- walk.c -- */

uint64_t part(uint64_t key, int64_t more); /* the key extended by one more part */
double gumbel(uint64_t state, int64_t id); /* the noise of an id in the stream in this state */

/* -- products.c, linear.c, blocks.c -- */

/* 16 columns of up to 8 rows: x [group][row], y rows of `stride` numbers. */
typedef void (*Tile)(const uint8_t *data, const Codes *x, float *y, int64_t groups, int64_t stride, int rows);
extern const Tile TILES[TYPES], NARROW_TILES[TYPES];
void float_columns(const Weight *weight, int64_t block, const float *x, float *y, int64_t stride, int64_t rows);
void columns(const Weight *weight, int64_t block, const Input *input, int64_t first, int64_t rows, float *y,
             int64_t stride, int64_t narrow);
void read_row(const Weight *weight, int64_t index, float *y);

/* -- what enters a product -- */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WORDS 0
#elif defined(__AVX2__)
#define WORDS 1 /* 16-bit codes are kept as words, of each four the first and third beside each other */
#else
#define WORDS 0
#endif

static const float NARROW_TOP = 127.0f, TOP = 127.0f * 256.0f; /* the largest codes of 8 and of 16 bits */
/* The bits of 2^-50 and of 2^74, between which the largest number of a group must lie. */
static const uint32_t TINY_BITS = 77u << 23, HUGE_BITS = 201u << 23;

typedef int32_t Wholes8 __attribute__((vector_size(32)));
typedef int32_t Wholes4 __attribute__((vector_size(16)));

INLINE Wholes4 folded(Wholes x) {
    Wholes8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
}

typedef int8_t Bytes16 __attribute__((vector_size(16)));

INLINE void put_bytes(int8_t *at, Wholes x) {
    Bytes16 bytes = __builtin_convertvector(x, Bytes16);
    memcpy(at, &bytes, sizeof bytes);
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Quantise a group of 32 numbers; the largest in magnitude, of narrow ones of each 16, gets the largest code. Tiny
   numbers become zeros. A NaN or a huge number makes the scale NaN, and so its row's result. */
INLINE void quantise(Reals low, Reals high, Codes *to, int64_t narrow) {
    const Reals halves[2] = {low, high};
    Wholes codes[2];
    for (int half = 0; half < 2; half++) {
        const uint32_t bits = narrow ? greatest_bits(halves[half], halves[half]) : greatest_bits(low, high);
        const float most = float_of(bits), top = narrow ? NARROW_TOP : TOP;
        const int usual = bits > TINY_BITS && bits < HUGE_BITS;
        to->scale[half] = usual ? most / top : bits >= HUGE_BITS ? __builtin_nanf("") : 0.0f;
        codes[half] = whole(usual ? nearest(halves[half] * (top / most)) : splat(0.0f));
    }
    const Wholes first = codes[0], second = codes[1];
    const Wholes4 a = folded(first), b = folded(second);
    const Wholes4 sums = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    to->count[0] = sums[0] + sums[1], to->count[1] = sums[2] + sums[3];
    to->sum = narrow ? (float)to->count[0] * to->scale[0] + (float)to->count[1] * to->scale[1]
                     : (float)(to->count[0] + to->count[1]) * to->scale[0];
    if (narrow) {
        put_bytes(to->high, first), put_bytes(to->high + WIDTH, second);
        return;
    }
#if WORDS
    typedef int16_t Words16 __attribute__((vector_size(32)));
    const Words16 a16 = __builtin_convertvector(first, Words16), b16 = __builtin_convertvector(second, Words16);
    const Words16 words[2] = {__builtin_shufflevector(a16, a16, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15),
                              __builtin_shufflevector(b16, b16, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)};
    memcpy(to->high, words, sizeof words);
#else
    Wholes upper = (first + 128) >> 8, more = (second + 128) >> 8;
    put_bytes(to->high, upper), put_bytes(to->high + WIDTH, more);
    put_bytes(to->low, first - (upper << 8)), put_bytes(to->low + WIDTH, second - (more << 8));
#endif
}

/* The address of group `group` of row `row` of `rows`. */
INLINE Codes *codes_at(Codes *codes, int64_t row, int64_t rows, int64_t group, int64_t groups) {
    int64_t first = row / TILE * TILE, now = rows - first < TILE ? rows - first : TILE;
    return codes + first * groups + group * now + row % TILE;
}
/* Write 32 numbers of a row into the input of a product. */
INLINE void put(const Input *input, int64_t row, int64_t rows, int64_t group, int64_t groups, Reals low, Reals high,
                int64_t narrow) {
    if (input->codes) quantise(low, high, codes_at(input->codes, row, rows, group, groups), narrow);
    if (input->floats) {
        store(input->floats + (row * groups + group) * GROUP, low);
        store(input->floats + (row * groups + group) * GROUP + WIDTH, high);
    }
}

/* -- stages of pass.c, which may call only stages of files below their own in this list -- */

void mixture(const Pass *p, const Layer *layer, const Input *normed, Member *member); /* mixture.c */
void attention(const Pass *p, int64_t index, Member *member);                         /* attention.c */
float softmax(float *scores, int64_t hidden, int64_t count, float cap);
void gate_up(const Pass *p, const Weight *gate, const Weight *up, const Input *input, const Input *to, int64_t group,
             int64_t rows, const Member *member); /* stages.c */
void norm_into(const float *x, const float *weight, int64_t size, float epsilon, const Input *to, int64_t row,
               int64_t rows, int64_t narrow, float *copy);
void norm_parts(const float *x, const float *weight, int64_t size, int64_t parts, float epsilon, const Input *to,
                int64_t row, int64_t rows);

void work_product(void *record, Member *member);
void work_look_up(void *record, Member *member);
void work_pass(void *record, Member *member);
void work_step(void *record, Member *member);
#endif
