/* Look-ups offer tokens to follow a path of drafted tokens: the token that came after the last earlier occurrence of
   the path's last tokens in the row, and the likeliest entries of n-gram tables. The likeliest come first, each with
   the probability that it is right and those before it are wrong. The same in Python:
   sampling/drafters/tables/lookup.py. */
#include "internal.h"
#include <math.h>

static const uint64_t PRIME = 0x9E3779B97F4A7C15u;

static void offer(Offers *l, int64_t token, double prob, int64_t source) {
    if (l->found < OFFERED) l->offers[l->found++] = (Offer){token, source, 0.0, prob};
}

/* Offer the last match of each length, the longest first. */
static void match(Offers *l) {
    const int64_t *row = l->row, *tail = l->tail + l->size - 1;
    const int64_t most = l->size < l->longest ? l->size : l->longest;
    int64_t after[CONTEXT + 1], best = 0;
    for (int64_t end = l->length - 1; end > 0 && best < most; end--) {
        if (row[end - 1] != *tail) continue;
        int64_t size = 1;
        while (size < most && size < end && row[end - 1 - size] == tail[-size]) size++;
        while (best < size) after[++best] = row[end];
    }
    for (int64_t size = best; size > 0; size--) offer(l, after[size], l->chance[size], l->match_source);
}

static int64_t first_not_below(const uint32_t *keys, int64_t count, uint32_t key) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Offer the likeliest entries of each context in the tables, the longest context first. */
static void read_tables(Offers *l) {
    const int64_t sizes = l->size < l->sizes ? l->size : l->sizes;
    uint32_t keys[CONTEXT];
    uint64_t state = 0;
    for (int64_t size = 0; size < sizes; size++) {
        const uint64_t token = (uint64_t)l->tail[l->size - 1 - size];
        state = (state + token + 1) * PRIME;
        state ^= state >> 32;
        keys[size] = (uint32_t)(size ? state : token);
    }
    for (int64_t size = sizes; size > 0; size--) {
        const TableLevel *level = l->levels + size - 1;
        int64_t at = first_not_below(level->keys, level->count, keys[size - 1]);
        for (int64_t last = at + l->most; at < last && at < level->count && level->keys[at] == keys[size - 1]; at++) {
            const uint8_t *bytes = level->tokens + at * level->token_bytes;
            int64_t token = 0;
            for (int64_t byte = level->token_bytes; byte > 0; byte--) token = token << 8 | bytes[byte - 1];
            if (token < l->end) offer(l, token, level->confidence[at] / 255.0, l->table_source);
        }
    }
}

/* Sort the offers: the likeliest first, of equal ones in the order of their sources. Keep each token once. */
static void put_in_order(Offers *l) {
    Offer *offers = l->offers;
    int64_t kept = 0;
    double left = 1.0;
    for (int64_t at = 1; at < l->found; at++) {
        const Offer moved = offers[at];
        int64_t to = at;
        for (; to > 0; to--) {
            const Offer *before = offers + to - 1;
            if (before->prob > moved.prob || (before->prob == moved.prob && before->source <= moved.source)) break;
            offers[to] = *before;
        }
        offers[to] = moved;
    }
    for (int64_t at = 0; at < l->found && left > 0; at++) {
        int64_t same = 0;
        while (same < kept && offers[same].token != offers[at].token) same++;
        if (same < kept) continue;
        offers[kept] = offers[at];
        offers[kept].p = left * offers[kept].prob;
        left *= 1 - offers[kept++].prob;
    }
    l->found = kept;
}

/* Multiply the weights of the offers by `share` of the noise. */
static void add_noise(Offers *l, double share) {
    const uint64_t state = part(l->key, l->position);
    for (int64_t at = 0; at < l->found && l->temperature > 0; at++) {
        const double noise = share * (l->temperature * (gumbel(state, l->offers[at].token) - l->noise_mean));
        l->offers[at].p *= exp(noise < l->most_noise ? noise : l->most_noise);
    }
}

static void limit(Offers *l, double total) {
    for (int64_t at = 0; at < l->found; at++) {
        const double p = l->offers[at].p / total;
        l->offers[at].p = p < l->most_prob ? p : l->most_prob;
    }
}

int64_t find_offers(Offers *l) {
    if (l->size > 0 && l->longest > 0) match(l);
    if (l->size > 0 && l->sizes > 0) read_tables(l);
    put_in_order(l);
    add_noise(l, l->noise_share);
    if (l->temperature > 0) limit(l, 1.0);
    return l->found;
}

/* Make the `known` offers, in order, and those of a model after them one distribution. The same in Python:
   sampling/drafters/proposal.py. */
int64_t pool_offers(Offers *l) {
    Offer *offers = l->offers;
    const int64_t known = l->known;
    double own[OFFERED] = {0.0}, left = 1.0, total = 0.0;
    int64_t count = known;
    for (int64_t at = known; at < l->found; at++) {
        int64_t same = 0;
        while (same < known && offers[same].token != offers[at].token) same++;
        if (same == known) same = count++, offers[same] = offers[at];
        own[same] = offers[at].prob;
    }
    l->found = count;
    for (int64_t at = 0; at < count; at++) {
        const double model = l->trust[l->model] * own[at];
        const double others = at < known ? l->trust[offers[at].source] * left * offers[at].prob : 0.0;
        left *= 1 - offers[at].prob;
        if (at >= known || model >= others) offers[at].source = l->model, offers[at].prob = own[at];
        offers[at].p = pow(others + model + l->listed, l->sharpening);
    }
    add_noise(l, l->pooled_share);
    for (int64_t at = 0; at < count; at++) total += offers[at].p;
    limit(l, l->unlisted + total);
    return count;
}
