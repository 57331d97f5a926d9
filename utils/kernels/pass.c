/* The whole pass of a decoder model, run by every member of a team; barriers separate its stages.

   The stages of a layer: norm | q, k, v, rotary, keys and values into the cache | attention | o, added to x | norm |
   gate, up, activation | down, added to x. Each ends in codes where a product follows. A row's results never
   depend on the other rows, the threads or the slots that its tokens lie in. A few rows are normed by every thread for
   itself, which costs less than a barrier. Pass and Layer hold the facts about a model; a norm or a weight
   that is NULL is not there. */
#include "internal.h"

/* An id that the model has no row for is read as its last one. */
static void embed(const Pass *p, Member *member) {
    Share rows = share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++) {
        float *x = p->x + row * p->hidden;
        const int64_t id = p->row[row].id, last = p->embed.rows - 1;
        read_row(&p->embed, id < 0 ? 0 : id < last ? id : last, x);
        if (p->embed_scale != 1.0f)
            for (int64_t at = 0; at < p->hidden; at++) x[at] *= p->embed_scale;
    }
}

/* -- norms -------------------------------------------------------------------------------------------------------- */

/* The buffer for normed rows: the thread's own if there are few rows, else one that all threads share. */
static Input normed_of(const Pass *p, const Member *member) {
    Input own = p->normed;
    if (p->rows <= FEW && own.codes) own.codes += member->thread * p->normed_codes;
    if (p->rows <= FEW && own.floats) own.floats += member->thread * p->normed_floats;
    return own;
}

static Input norm(const Pass *p, const float *weight, Member *member) {
    Input to = normed_of(p, member);
    Share rows = p->rows <= FEW ? (Share){0, p->rows} : share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++)
        norm_into(p->x + row * p->hidden, weight, p->hidden, p->epsilon, &to, row, p->rows, p->narrow, 0);
    if (p->rows > FEW) meet(member);
    return to;
}

/* The last norm, of the rows that get logits; of all rows if their states are wanted. */
static void last_norm(const Pass *p, Member *member) {
    Share rows = share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++) {
        const int64_t sequence = row / p->fed, place = row % p->fed - (p->fed - p->kept);
        float *states = p->states ? p->states + row * p->states_row : 0;
        if (place >= 0 || states)
            norm_into(p->x + row * p->hidden, p->norm, p->hidden, p->epsilon, place >= 0 ? &p->normed : 0,
                      sequence * p->kept + place, p->kept * (p->rows / p->fed), p->narrow, states);
    }
}

static void keep_states(const Pass *p, float *states, Member *member) {
    Share rows = share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++)
        memcpy(states + row * p->states_row, p->x + row * p->hidden, sizeof(float) * (size_t)p->hidden);
}

/* -- queries, keys and values ------------------------------------------------------------------------------------- */

/* A head of a query or key rotated to its position, in place, and scaled: dimensions `part` of either half. */
static void rotate(const Pass *p, const Layer *layer, float *x, int64_t position, float scale, Share part) {
    const int64_t half = p->rotary_dim / 2, rotated = layer->table >= 0 ? p->rotary_dim : 0;
    if (rotated) {
        const float *angles = p->tables[layer->table] + rotated * position;
        for (int64_t at = part.first; at < part.last && at < half; at += WIDTH) {
            Reals a = load(x + at), b = load(x + half + at), cosine = load(angles + at), sine = load(angles + half + at);
            store(x + at, (a * cosine - b * sine) * scale);
            store(x + half + at, (b * cosine + a * sine) * scale);
        }
    }
    if (rotated == p->size || scale == 1.0f) return;
    for (int64_t at = rotated; at < p->size; at += WIDTH) {
        const int64_t within = at % (p->size / 2);
        if (rotated || (within >= part.first && within < part.last)) store(x + at, load(x + at) * scale);
    }
}

/* The index in the cache at which the slots of a layer, sequence and head begin. */
static int64_t cached(const Pass *p, int64_t index, int64_t sequence, int64_t head) {
    return ((index * p->batch + sequence) * p->shared + head) * p->slots * p->size;
}
/* Numbers of a slot's key lie 16 apart, since 16 slots lie side by side. */
static int64_t key_at(const Pass *p, int64_t index, int64_t sequence, int64_t head, int64_t slot) {
    return cached(p, index, sequence, head) + slot / WIDTH * WIDTH * p->size + slot % WIDTH;
}

static void put_key(const Pass *p, int64_t at, const float *x) {
    if (p->half) {
        _Float16 numbers[WIDTH];
        store_half(numbers, load(x));
        for (int i = 0; i < WIDTH; i++) ((_Float16 *)p->keys)[at + WIDTH * i] = numbers[i];
    } else {
        for (int i = 0; i < WIDTH; i++) ((float *)p->keys)[at + WIDTH * i] = x[i];
    }
}

static void put_value(const Pass *p, int64_t at, const float *x) {
    if (p->half)
        store_half((_Float16 *)p->values + at, load(x));
    else
        store((float *)p->values + at, load(x));
}

/* Rotate a head of queries or keys and write keys and values into the cache, dimensions `part` of either half. */
static void place(const Pass *p, const Layer *layer, int64_t index, int64_t row, int64_t head, Share part) {
    const Row *of = &p->row[row];
    const int64_t half = p->size / 2, values = p->heads + p->shared;
    float *x = p->qkv + (row * (p->heads + 2 * p->shared) + head) * p->size;
    const float *weight = head < p->heads ? layer->q_norm : head < values ? layer->k_norm : 0;
    if (weight && !layer->wide_norm) norm_into(x, weight, p->size, p->epsilon, 0, 0, 0, 0, x);
    if (head < values) rotate(p, layer, x, of->position, head < p->heads ? p->scale : 1.0f, part);
    if (head < p->heads) return;
    for (int64_t side = 0; side < 2; side++)
        for (int64_t at = side * half + part.first; at < side * half + part.last; at += WIDTH)
            if (head < values)
                put_key(p, key_at(p, index, of->sequence, head - p->heads, of->slot) + WIDTH * at, x + at);
            else
                put_value(p, cached(p, index, of->sequence, head - values) + of->slot * p->size + at, x + at);
}

/* Moves accepted tokens' keys or values of one head to their final slots, before `place` writes new ones. */
static void carry(const Pass *p, int64_t index, int64_t head, Share part) {
    const int64_t half = p->size / 2, values = p->heads + p->shared, bytes = p->half ? 2 : 4;
    for (int64_t move = 0; move < p->moved; move++) {
        const int64_t sequence = p->moves[3 * move], old = p->moves[3 * move + 1], new = p->moves[3 * move + 2];
        uint8_t *base = head < values ? p->keys : p->values;
        int64_t from, to, step;
        if (head < values) {
            from = key_at(p, index, sequence, head - p->heads, old), to = key_at(p, index, sequence, head - p->heads, new);
            step = WIDTH;
        } else {
            from = cached(p, index, sequence, head - values) + old * p->size;
            to = cached(p, index, sequence, head - values) + new * p->size;
            step = 1;
        }
        for (int64_t side = 0; side < 2; side++)
            for (int64_t at = side * half + part.first; at < side * half + part.last; at++)
                memcpy(base + bytes * (to + step * at), base + bytes * (from + step * at), (size_t)bytes);
    }
}

/* The weight that computes head `head` of queries, keys and values, and the head's number in it. */
static const Weight *weight_of(const Pass *p, const Layer *layer, int64_t head, int64_t *own) {
    *own = head < p->heads ? head : head < p->heads + p->shared ? head - p->heads : head - p->heads - p->shared;
    return head < p->heads ? &layer->q : head < p->heads + p->shared ? &layer->k : &layer->v;
}

/* Norms of all heads' queries and of all heads' keys together, then `place`. */
static void place_rows(const Pass *p, const Layer *layer, int64_t index, Member *member) {
    const int64_t every = p->heads + 2 * p->shared, keys = p->heads * p->size;
    meet(member);
    Share rows = share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++) {
        float *x = p->qkv + row * every * p->size;
        norm_into(x, layer->q_norm, keys, p->epsilon, 0, 0, 0, 0, x);
        norm_into(x + keys, layer->k_norm, p->shared * p->size, p->epsilon, 0, 0, 0, 0, x + keys);
        for (int64_t head = 0; head < every; head++) place(p, layer, index, row, head, (Share){0, p->size / 2});
    }
}

/* Queries, keys and values of all rows. Units are the two blocks of 16 columns that a rotation combines, or whole heads
   where a norm or a partial rotation combines more. The first unit is the middle of the keys, which take longest to
   write, so that two threads get half of them each. */
static void project(const Pass *p, const Layer *layer, int64_t index, const Input *normed, Member *member) {
    const int64_t every = p->heads + 2 * p->shared, pairs = p->size / GROUP;
    const int64_t parts = layer->q_norm || p->rotary_dim != p->size ? 1 : pairs;
    const int64_t units = every * parts, middle = p->heads * parts + p->shared * parts / 2;
    Share mine = share(units, member);
    for (int64_t nth = mine.first; nth < mine.last; nth++) {
        const int64_t unit = (nth + middle) % units, head = unit / parts, part = unit % parts;
        int64_t own;
        const Weight *weight = weight_of(p, layer, head, &own);
        const Share inside = {part * pairs / parts, (part + 1) * pairs / parts};
        for (int64_t pair = inside.first; pair < inside.last; pair++)
            for (int64_t half = 0; half < 2; half++) {
                const int64_t at = half * pairs + pair; /* of a head's blocks of 16 columns */
                columns(weight, own * 2 * pairs + at, normed, 0, p->rows, p->qkv + head * p->size + COLUMNS * at,
                        every * p->size, p->narrow);
            }
        const Share dimensions = {COLUMNS * inside.first, COLUMNS * inside.last};
        if (p->moved && head >= p->heads) carry(p, index, head, dimensions);
        if (layer->wide_norm) continue;
        for (int64_t row = 0; row < p->rows; row++) place(p, layer, index, row, head, dimensions);
    }
    if (layer->wide_norm) place_rows(p, layer, index, member);
}

/* -- what follows attention ---------------------------------------------------------------------------------------- */

/* Add the product, scaled, to `to`, or replace `to` by the product; units of 16 columns. */
static void added(const Pass *p, const Weight *weight, const Input *input, float *to, int replaces, Member *member) {
    float *buffer = p->buffer + member->thread * p->buffer_size;
    Share units = share(p->hidden / COLUMNS, member);
    for (int64_t unit = units.first; unit < units.last; unit++)
        for (int64_t start = 0; start < p->rows; start += TILE) {
            const int64_t rows = p->rows - start < TILE ? p->rows - start : TILE;
            columns(weight, unit, input, start, rows, buffer, COLUMNS, p->narrow);
            for (int64_t row = 0; row < rows; row++) {
                float *x = to + (start + row) * p->hidden + COLUMNS * unit;
                Reals y = load(buffer + COLUMNS * row);
                store(x, replaces ? y : p->residual_scale == 1.0f ? load(x) + y : load(x) + y * p->residual_scale);
            }
        }
}

/* Wait for the whole product; if a norm `after` it is given, norm the product in `side` and add it to x. */
static void settle(const Pass *p, const float *after, Member *member) {
    meet(member);
    if (!after) return;
    Share rows = share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++) {
        float *x = p->x + row * p->hidden, *side = p->side + row * p->hidden;
        norm_into(side, after, p->hidden, p->epsilon, 0, 0, 0, 0, side);
        for (int64_t at = 0; at < p->hidden; at += WIDTH)
            store(x + at, load(x + at) + load(side + at) * p->residual_scale);
    }
    meet(member);
}

/* x += the product, which is normed first where the layer says so. */
static void residual(const Pass *p, const Weight *weight, const Input *input, const float *after, Member *member) {
    added(p, weight, input, after ? p->side : p->x, after != 0, member);
    settle(p, after, member);
}

/* The layer's MLP of the normed rows, or its mixture, added to x. */
static void mlp(const Pass *p, const Layer *layer, const Input *normed, Member *member) {
    if (layer->experts) {
        mixture(p, layer, normed, member);
        settle(p, layer->after_mlp, member);
        return;
    }
    Share groups = share(layer->gate.rows / GROUP, member);
    for (int64_t group = groups.first; group < groups.last; group++)
        gate_up(p, &layer->gate, &layer->up, normed, &p->gated, group, p->rows, member);
    meet(member);
    residual(p, &layer->down, &p->gated, layer->after_mlp, member);
}

static void head(const Pass *p, Member *member) {
    const int64_t blocks = blocks_of(p->head.rows), rows = p->kept * (p->rows / p->fed);
    Share units = share(blocks, member);
    for (int64_t unit = units.first; unit < units.last; unit++) {
        float *y = p->logits + COLUMNS * unit;
        columns(&p->head, unit, &p->normed, 0, rows, y, COLUMNS * blocks, p->narrow);
        for (int64_t row = 0; row < rows && (p->logit_scale != 1.0f || p->logit_cap > 0); row++) {
            Reals x = load(y + row * COLUMNS * blocks) * p->logit_scale;
            store(y + row * COLUMNS * blocks,
                  p->logit_cap > 0 ? hyperbolic_tangent(x / p->logit_cap) * p->logit_cap : x);
        }
    }
}

/* All layers over x. */
static void layers(const Pass *p, Member *member) {
    for (int64_t index = 0; index < p->layers; index++) {
        const Layer *layer = &p->layer[index];
        if (layer->states) keep_states(p, layer->states, member);
        Input normed = norm(p, layer->before, member);
        project(p, layer, index, &normed, member);
        meet(member);
        attention(p, index, member);
        meet(member);
        residual(p, &layer->o, &p->mixed, layer->after_attention, member);
        normed = norm(p, layer->between, member);
        mlp(p, layer, &normed, member);
    }
}

void work_pass(void *record, Member *member) {
    const Pass *p = record;
    embed(p, member);
    meet(member);
    layers(p, member);
    last_norm(p, member);
    meet(member);
    head(p, member);
}

/* -- a feature head's pass ----------------------------------------------------------------------------------------- */

enum { NONE, THEIRS, OWN }; /* whose state is before a row: nobody's, the target's, the head's */

static void put_nothing(Codes *to, int64_t row, int64_t rows, int64_t size) {
    for (int64_t group = 0; group < size / GROUP; group++)
        quantise(splat(0.0f), splat(0.0f), codes_at(to, row, rows, group, size / GROUP), 0);
}

/* For every row the normed embedding of its token, and the normed state before it as input of `join_theirs` or of
   `join_own`; the other input is zeros. */
static void enter(const Step *s, Member *member) {
    const Pass *p = &s->pass;
    Share rows = share(p->rows, member);
    const Input entered = {s->entered, 0}, theirs = {s->theirs, 0}, own = {s->own, 0};
    for (int64_t row = rows.first; row < rows.last; row++) {
        const int64_t kind = s->kinds[row], token = p->row[row].id;
        float *read = p->x + row * p->hidden;
        const float *embedded = s->table ? s->table + token * p->hidden : read;
        if (!s->table) read_row(&p->embed, token, read);
        norm_into(embedded, s->embed_norm, p->hidden, p->epsilon, &entered, row, p->rows, 0, 0);
        if (s->any_theirs && kind == THEIRS)
            norm_parts(s->states_before[row], s->theirs_norm, s->large, s->parts, p->epsilon, &theirs, row, p->rows);
        else if (s->any_theirs)
            put_nothing(s->theirs, row, p->rows, s->parts * s->large);
        if (s->any_own && kind == OWN)
            norm_into(s->states_before[row], s->own_norm, p->hidden, p->epsilon, &own, row, p->rows, 0, 0);
        else if (s->any_own)
            put_nothing(s->own, row, p->rows, p->hidden);
    }
}

/* Store x of every row as its state, and norm x of the rows that get logits. */
static void leave(const Pass *p, Member *member) {
    Share rows = share(p->rows, member);
    for (int64_t row = rows.first; row < rows.last; row++) {
        const int64_t sequence = row / p->fed, place = row % p->fed - (p->fed - p->kept);
        const float *x = p->x + row * p->hidden;
        memcpy(p->states + row * p->hidden, x, sizeof(float) * (size_t)p->hidden);
        if (place >= 0)
            norm_into(x, p->norm, p->hidden, p->epsilon, &p->normed, sequence * p->kept + place,
                      p->kept * (p->rows / p->fed), p->narrow, 0);
    }
}

void work_step(void *record, Member *member) {
    const Step *s = record;
    const Pass *p = &s->pass;
    const Input entered = {s->entered, 0}, theirs = {s->theirs, 0}, own = {s->own, 0};
    enter(s, member);
    meet(member);
    added(p, &s->join, &entered, p->x, 1, member);
    if (s->any_theirs) added(p, &s->join_theirs, &theirs, p->x, 0, member);
    if (s->any_own) added(p, &s->join_own, &own, p->x, 0, member);
    meet(member);
    layers(p, member);
    leave(p, member);
    meet(member);
    head(p, member);
}
