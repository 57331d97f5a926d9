/* softmax(queries · keys) · values. Sums over slots run in the slots' order for every query by itself, so a row's
   result depends on what it sees alone. Queries that see the same slots, of several rows too, share one reading of
   them. */
#include "internal.h"

#if defined(__AVX512F__)
enum { QUERIES = 8 };
#elif defined(__AVX2__)
enum { QUERIES = 6 };
#else
enum { QUERIES = 4 };
#endif
static const float HIDDEN = -1e30f; /* the score of an absent slot */
enum { CHUNK = 64, MOST_QUERIES = 64 }; /* slots that stay in the L1 cache for all queries of a tile; heads of queries
                                           that share a head of keys, at most */

/* The queries of a tile, [row][head], and their working memory. */
typedef struct {
    const Pass *p;
    const float *queries[TILE];
    float *scores; /* [query][scores_row] */
    float *sums;   /* [query][size] */
    int64_t group, size; /* group: queries of a row */
} Tiles;

/* How many vectors of 16 sums the registers hold for each query when `count` queries are computed at once. */
INLINE int beside_of(int count) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return count <= 2 ? 4 : count == 3 ? 2 : 1;
#else
    return count <= QUERIES / 2 ? 4 : 2;
#endif
}

INLINE Reals number16(const uint8_t *at, int64_t index, int half) {
    return half ? load_half((const _Float16 *)at + index) : load((const float *)at + index);
}

/* Scores of `count` queries for `beside` blocks of 16 slots at once; keys are prefetched a chunk ahead. */
INLINE void score_blocks(int count, int beside, int half, const uint8_t *keys, const float *const *queries,
                         float *const *scores, int64_t slot, int64_t size) {
    Reals sums[QUERIES][4] = {{{0}}};
    const int64_t bytes = half ? 2 : 4, ahead = bytes * CHUNK * size;
    for (int64_t at = 0; at < size; at += 2) {
        for (int b = 0; b < beside; b++) __builtin_prefetch(keys + ahead + bytes * WIDTH * (size * b + at), 0, 3);
        for (int64_t now = at; now < at + 2; now++) {
            Reals key[4];
            for (int b = 0; b < beside; b++) key[b] = number16(keys, WIDTH * (size * b + now), half);
            for (int q = 0; q < count; q++)
                for (int b = 0; b < beside; b++) sums[q][b] = fma16(key[b], splat(queries[q][now]), sums[q][b]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int b = 0; b < beside; b++) store(scores[q] + slot + WIDTH * b, sums[q][b]);
}

/* The same for any number of blocks. */
INLINE void score_some(int count, int half, const uint8_t *keys, const float *const *queries, float *const *scores,
                       int64_t blocks, int64_t size) {
    const int beside = beside_of(count);
    const int64_t bytes = (half ? 2 : 4) * WIDTH * size;
    int64_t block = 0;
    for (; block + beside <= blocks; block += beside)
        score_blocks(count, beside, half, keys + bytes * block, queries, scores, WIDTH * block, size);
    for (; block < blocks; block++)
        score_blocks(count, 1, half, keys + bytes * block, queries, scores, WIDTH * block, size);
}

/* sums += weight · value of `count` queries over the slots in order, 16 · `parts` dimensions at once. */
INLINE void mix_part(int count, int parts, int half, const uint8_t *values, float *const *weights, float *const *sums,
                     int64_t slots, int64_t size, int64_t first) {
    const int64_t bytes = half ? 2 : 4;
    Reals held[QUERIES][4];
    for (int q = 0; q < count; q++)
        for (int part = 0; part < parts; part++) held[q][part] = load(sums[q] + first + WIDTH * part);
    values += bytes * first;
    for (int64_t slot = 0; slot < slots; slot++, values += bytes * size) {
        for (int at = 0; at < parts; at += 2) __builtin_prefetch(values + bytes * (CHUNK * size + WIDTH * at), 0, 3);
        Reals value[4];
        for (int part = 0; part < parts; part++) value[part] = number16(values, WIDTH * part, half);
        for (int q = 0; q < count; q++) {
            const Reals weight = splat(weights[q][slot]);
            for (int part = 0; part < parts; part++) held[q][part] = fma16(weight, value[part], held[q][part]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int part = 0; part < parts; part++) store(sums[q] + first + WIDTH * part, held[q][part]);
}

INLINE void mix_some(int count, int half, const uint8_t *values, float *const *weights, float *const *sums,
                     int64_t slots, int64_t size) {
    const int parts = beside_of(count);
    int64_t first = 0;
    for (; first + WIDTH * parts <= size; first += WIDTH * parts)
        mix_part(count, parts, half, values, weights, sums, slots, size, first);
    for (; first < size; first += WIDTH) mix_part(count, 1, half, values, weights, sums, slots, size, first);
}

#define CASE(n, function, ...)                                \
    case 2 * n: function(n, 0, __VA_ARGS__); break;           \
    case 2 * n + 1: function(n, 1, __VA_ARGS__); break;
#if defined(__AVX512F__)
#define CASES(function, ...)                                                                  \
    CASE(1, function, __VA_ARGS__) CASE(2, function, __VA_ARGS__) CASE(3, function, __VA_ARGS__) \
    CASE(4, function, __VA_ARGS__) CASE(5, function, __VA_ARGS__) CASE(6, function, __VA_ARGS__) \
    CASE(7, function, __VA_ARGS__) CASE(8, function, __VA_ARGS__)
#elif defined(__AVX2__)
#define CASES(function, ...)                                                                  \
    CASE(1, function, __VA_ARGS__) CASE(2, function, __VA_ARGS__) CASE(3, function, __VA_ARGS__) \
    CASE(4, function, __VA_ARGS__) CASE(5, function, __VA_ARGS__) CASE(6, function, __VA_ARGS__)
#else
#define CASES(function, ...)                                                                  \
    CASE(1, function, __VA_ARGS__) CASE(2, function, __VA_ARGS__) CASE(3, function, __VA_ARGS__) \
    CASE(4, function, __VA_ARGS__)
#endif

/* Scores of queries `first` to `last` of the tile. `keys`: the first block; `slot`: the index of its first slot's
   score. */
static void score(const Tiles *t, int64_t first, int64_t last, const uint8_t *keys, int64_t slot, int64_t blocks) {
    for (; first < last; first += QUERIES) {
        const float *queries[QUERIES];
        float *scores[QUERIES];
        const int64_t count = last - first < QUERIES ? last - first : QUERIES;
        for (int64_t q = 0; q < count; q++) {
            queries[q] = t->queries[(first + q) / t->group] + (first + q) % t->group * t->size;
            scores[q] = t->scores + (first + q) * t->p->scores_row + slot;
        }
        switch (2 * count + t->p->half) { CASES(score_some, keys, queries, scores, blocks, t->size) }
    }
}

static void mix(const Tiles *t, int64_t first, int64_t last, const uint8_t *values, int64_t slot, int64_t slots) {
    for (; first < last; first += QUERIES) {
        float *weights[QUERIES], *sums[QUERIES];
        const int64_t count = last - first < QUERIES ? last - first : QUERIES;
        for (int64_t q = 0; q < count; q++) {
            weights[q] = t->scores + (first + q) * t->p->scores_row + slot;
            sums[q] = t->sums + (first + q) * t->size;
        }
        switch (2 * count + t->p->half) { CASES(mix_some, values, weights, sums, slots, t->size) }
    }
}

/* Cap the scores if `cap` is above 0, replace each by e^(score - largest), and return 1 / their sum. The first `hidden`
   scores, and the rest of the last block of 16, count as unseen; there is room for the whole block. */
float softmax(float *scores, int64_t hidden, int64_t count, float cap) {
    if (cap > 0)
        for (int64_t at = 0; at < count; at += WIDTH)
            store(scores + at, hyperbolic_tangent(load(scores + at) / cap) * cap);
    for (int64_t at = 0; at < hidden; at++) scores[at] = HIDDEN;
    for (int64_t at = count; at % WIDTH; at++) scores[at] = HIDDEN;
    Reals top = load(scores), sums = splat(0.0f);
    for (int64_t at = WIDTH; at < count; at += WIDTH) top = larger(top, load(scores + at));
    const Reals most = splat(largest(top));
    for (int64_t at = 0; at < count; at += WIDTH) {
        Reals part = exponential(load(scores + at) - most);
        store(scores + at, part);
        sums += part;
    }
    return 1.0f / total(sums);
}

/* The first slot that a row sees. */
static int64_t begin_of(const Row *row, int64_t window) {
    int64_t begin = window ? row->position + 1 - window : 0;
    begin = begin > 0 ? begin : 0;
    return begin < row->seen ? begin : row->seen;
}

/* Add up the values of contiguous slots. Slots [from, to), which every row of the tile sees, are read once for all
   rows; the weight of slot `zero` is the first of the scores. */
static void mix_tile(const Tiles *t, const Row *row, int64_t rows, const int64_t *begin, const uint8_t *values,
                     int64_t slot_bytes, int64_t zero) {
    int64_t from = begin[0], to = row[0].seen;
    for (int64_t r = 0; r < rows; r++) {
        from = begin[r] > from ? begin[r] : from;
        to = row[r].seen < to ? row[r].seen : to;
    }
    if (to < from) to = from;
    for (int64_t r = 0; r < rows; r++)
        if (begin[r] < from) {
            const int64_t end = row[r].seen < from ? row[r].seen : from;
            mix(t, r * t->group, (r + 1) * t->group, values + begin[r] * slot_bytes, begin[r] - zero, end - begin[r]);
        }
    for (int64_t slot = from; slot < to; slot += CHUNK) {
        const int64_t now = to - slot < CHUNK ? to - slot : CHUNK;
        mix(t, 0, rows * t->group, values + slot * slot_bytes, slot - zero, now);
    }
    for (int64_t r = 0; r < rows; r++)
        if (row[r].seen > to)
            mix(t, r * t->group, (r + 1) * t->group, values + to * slot_bytes, to - zero, row[r].seen - to);
}

/* Store the scores of the slots in a row's list `more`, without the `skipped` first, from index `place` on; return
   their number. */
static int64_t score_more(const Tiles *t, const Row *row, int64_t r, int64_t skipped, const uint8_t *keys,
                          int64_t slot_bytes, int64_t place, float *spare) {
    const int64_t line = t->p->scores_row;
    for (int64_t at = skipped; at < row->count; at++) {
        const int64_t slot = row->more[at];
        Tiles alone = *t;
        alone.scores = spare - r * t->group * line;
        score(&alone, r * t->group, (r + 1) * t->group, keys + slot / WIDTH * WIDTH * slot_bytes, 0, 1);
        for (int64_t q = 0; q < t->group; q++)
            t->scores[(r * t->group + q) * line + place + at - skipped] = spare[q * line + slot % WIDTH];
    }
    return row->count - skipped;
}

/* Attention of one key/value head for rows of one sequence. */
static void attend(const Tiles *t, const Row *row, int64_t rows, int64_t window, const uint8_t *keys,
                   const uint8_t *values, float *inverse) {
    const int64_t slot_bytes = t->size * (t->p->half ? 2 : 4), queries = rows * t->group, line = t->p->scores_row;
    int64_t begin[TILE], least = row[0].seen, most = 0;
    for (int64_t r = 0; r < rows; r++) {
        begin[r] = begin_of(&row[r], window);
        least = begin[r] < least ? begin[r] : least;
        most = row[r].seen > most ? row[r].seen : most;
    }
    const int64_t zero = least / WIDTH * WIDTH;
    for (int64_t slot = zero; slot < most; slot += CHUNK) {
        const int64_t left = (most - slot + WIDTH - 1) / WIDTH;
        score(t, 0, queries, keys + slot * slot_bytes, slot - zero, left < CHUNK / WIDTH ? left : CHUNK / WIDTH);
    }
    float *spare = t->scores + TILE * t->group * line;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t beyond = window ? row[r].position + 1 - window - row[r].seen : 0;
        const int64_t skipped = beyond > 0 ? beyond : 0, place = row[r].seen - zero;
        const int64_t more = score_more(t, &row[r], r, skipped, keys, slot_bytes, place, spare);
        for (int64_t q = r * t->group; q < (r + 1) * t->group; q++) {
            const int64_t skip = begin[r] / WIDTH * WIDTH - zero; /* whole blocks that this row does not see */
            float *scores = t->scores + q * line + skip;
            inverse[q] = softmax(scores, begin[r] - zero - skip, place + more - skip, t->p->attention_cap);
        }
    }
    memset(t->sums, 0, sizeof(float) * (size_t)(queries * t->size));
    mix_tile(t, row, rows, begin, values, slot_bytes, zero);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t beyond = window ? row[r].position + 1 - window - row[r].seen : 0;
        for (int64_t at = beyond > 0 ? beyond : 0; at < row[r].count; at++)
            mix(t, r * t->group, (r + 1) * t->group, values + row[r].more[at] * slot_bytes,
                row[r].seen - zero + at - (beyond > 0 ? beyond : 0), 1);
    }
}

/* `group` queries, from the head's `first` on, of each of these rows; the results are the input of `o`, the product
   after attention. */
static void attend_some(const Pass *p, int64_t index, int64_t head, int64_t first, int64_t group, int64_t start,
                        int64_t rows, const Member *member) {
    const int64_t every = p->heads + 2 * p->shared, groups = p->heads * p->size / GROUP;
    const int64_t query = head * (p->heads / p->shared) + first;
    float inverse[TILE * MOST_QUERIES];
    Tiles tiles = {p, {0}, p->scores + member->thread * p->scores_size, p->buffer + member->thread * p->buffer_size,
                   group, p->size};
    for (int64_t r = 0; r < rows; r++) tiles.queries[r] = p->qkv + ((start + r) * every + query) * p->size;
    const int64_t at = ((index * p->batch + p->row[start].sequence) * p->shared + head) * p->slots * p->size;
    const int64_t bytes = p->half ? 2 : 4;
    attend(&tiles, p->row + start, rows, p->layer[index].window, p->keys + bytes * at, p->values + bytes * at, inverse);
    for (int64_t q = 0; q < rows * group; q++)
        for (int64_t part = 0; part < p->size / GROUP; part++) {
            const float *x = tiles.sums + q * p->size + GROUP * part;
            put(&p->mixed, start + q / group, p->rows, (query + q % group) * p->size / GROUP + part, groups,
                load(x) * inverse[q], load(x + WIDTH) * inverse[q], p->narrow);
        }
}

/* Units are (key head, row), rows of one sequence in tiles. Where fewer than 8 rows give a number of these that is no
   multiple of the threads, units are single queries. */
void attention(const Pass *p, int64_t index, Member *member) {
    const int64_t group = p->heads / p->shared, few = p->shared * p->rows % member->threads;
    const int64_t split = few && p->rows < TILE ? group : 1;
    Share units = share(p->shared * p->rows * split, member);
    for (int64_t unit = units.first; unit < units.last;) {
        const int64_t whole = unit / split, head = whole / p->rows, start = whole % p->rows, first = unit % split;
        if (split > 1 && (first || units.last - unit < split)) { /* part of a head's queries */
            const int64_t now = units.last - unit < split - first ? units.last - unit : split - first;
            attend_some(p, index, head, first, now, start, 1, member);
            unit += now;
            continue;
        }
        const int64_t left = p->fed - start % p->fed, mine = (units.last - unit) / split;
        int64_t rows = mine < TILE ? mine : TILE;
        rows = left < rows ? left : rows;
        rows = p->rows - start < rows ? p->rows - start : rows;
        attend_some(p, index, head, 0, group, start, rows, member);
        unit += rows * split;
    }
}
