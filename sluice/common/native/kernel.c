/* The inner loops of Sluice: pages of Parquet files, rows and bags on their way to batches, hashes,
   and lines of text. Python calls them through ctypes (`__init__.py`), without the interpreter's
   lock.

   All arguments are 64 bits wide: numbers, or addresses of contiguous arrays. A function keeps no
   state, starts no thread and takes no memory, but for `encode_texts`. Callers own all memory and
   say how large it is; every number that comes from a file is checked here before anything is read
   through it. Bits are the same on every machine: little-endian, no fused or reordered floating
   point (kernel_build.py has the options). */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ ||                       \
    UINTPTR_MAX < UINT64_MAX
#error "a machine of 64 bits, little-endian, is needed"
#endif

typedef uint8_t u8;
typedef int32_t i32;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;
typedef u64 (*Function)(u64, u64, u64, u64); /* of another library: checksums and codecs */

const char source_digest[] = SOURCE_DIGEST; /* which source this library was built from */

enum { WORDS, IDS, WORDS_TO_FLOATS, DOUBLES_TO_FLOATS, LONGS_TO_FLOATS, LONGS_TO_IDS };
enum { CHECKSUM = 0, SNAPPY = 1, ZSTD = 6, LZ4_RAW = 7, FUNCTIONS = 8 };
enum { READ_BEYOND = 8 }; /* bytes that may be read after the end of a page with indices */

static i64 smaller(i64 a, i64 b) {
    return a < b ? a : b;
}
static i64 larger(i64 a, i64 b) {
    return a > b ? a : b;
}

static u64 word_at(const u8 *at) {
    u64 word;
    memcpy(&word, at, 8);
    return word;
}

static u32 half_at(const u8 *at) {
    u32 half;
    memcpy(&half, at, 4);
    return half;
}

/* ---- numbers of variable length, and Thrift's compact protocol */

/* Returns a number, and moves `at` behind it. -1, and `at` beyond `end`: it has no end. */
static i64 varint(const u8 *raw, i64 *at, i64 end) {
    u64 value = 0;
    for (int shift = 0; *at < end && shift < 63; shift += 7) {
        u8 byte = raw[(*at)++];
        value |= (u64)(byte & 127) << shift;
        if (byte < 128) return (i64)value;
    }
    *at = end + 1;
    return -1;
}

static i64 zigzag(i64 value) {
    return (i64)((u64)value >> 1) ^ -(value & 1);
}

/* Returns a number, or the length of a text. `at` goes beyond `end` for what is neither. */
static i64 thrift_value(const u8 *raw, i64 *at, i64 end, i64 kind) {
    if (kind == 3 || kind == 7) {
        *at += kind == 3 ? 1 : 8;
        return 0;
    }
    if (kind < 4 || kind > 8) {
        *at = end + 1;
        return 0;
    }
    i64 value = varint(raw, at, end);
    if (kind < 8) return zigzag(value);
    *at = value >= 0 && value <= end - *at ? *at + value : end + 1;
    return value;
}

/* Parses one struct of Thrift's compact protocol, in the bytes from `begin` to `end` of `raw`.
   Writes a pair for each number in it: the path of its field, with 6 bits a level, and its value. A
   text counts as its length, a struct as 0, a bool as 0 or 1. Returns how many pairs there are, or
   -1: the bytes are no such struct, or there is no room for more than `most` pairs. Without
   `numbers`, it only counts. `stop` is where the struct ends. */
i64 thrift_numbers(const u8 *raw, i64 begin, i64 end, i64 (*numbers)[2], i64 most, i64 *stop) {
    struct {
        i64 left, kind, path, field; /* left: elements of a list; -1: a struct */
    } stack[32] = {{-1, 0, 0, 0}};
    i64 count = 0, depth = 0, at = begin;
    while (depth >= 0) {
        if (!stack[depth].left) {
            depth--;
            continue;
        }
        if (at >= end || depth > 8) return -1;
        i64 kind, path;
        if (stack[depth].left > 0) {
            stack[depth].left--;
            kind = stack[depth].kind;
            path = stack[depth].path;
            at += kind <= 2; /* a bool in a list has a byte */
        } else {
            u8 head = raw[at++];
            kind = head & 15;
            if (!kind) {
                depth--;
                continue;
            }
            i64 field = stack[depth].field + (head >> 4);
            if (!(head >> 4)) field = zigzag(varint(raw, &at, end));
            stack[depth].field = field;
            if (field < 0 || field >= 64) return -1;
            path = (i64)((u64)stack[depth].path << 6) | field;
        }
        i64 value = kind == 1;
        if (kind == 9 || kind == 10) {
            if (at >= end) return -1;
            u8 head = raw[at++];
            i64 size = head >> 4;
            if (size == 15) size = varint(raw, &at, end);
            if (size < 0 || size > end - at) return -1;
            depth++;
            stack[depth].left = size;
            stack[depth].kind = head & 15;
            stack[depth].path = path;
            continue;
        }
        if (kind == 12) {
            depth++;
            stack[depth].left = -1;
            stack[depth].path = path;
            stack[depth].field = 0;
        } else if (kind > 2) {
            value = thrift_value(raw, &at, end, kind);
        }
        if (at > end || (numbers && count == most)) return -1;
        if (numbers) {
            numbers[count][0] = path;
            numbers[count][1] = value;
        }
        count++;
    }
    *stop = at;
    return count;
}

/* ---- pages */

/* Unpacks Snappy. 0: it is damaged, or has not `room` bytes. Up to READ_BEYOND bytes more are read
   and written. */
i64 unpack_snappy(const u8 *raw, i64 size, u8 *into, i64 room) {
    i64 at = 0, done = 0;
    if (varint(raw, &at, size) != room) return 0;
    while (at < size) {
        i64 tag = raw[at++], kind = tag & 3, length = (tag >> 2) + 1;
        i64 more = kind ? 1 << (kind - 1) : larger(length - 60, 0);
        if (more > size - at) return 0;
        i64 number = (i64)(half_at(raw + at) & (((u64)1 << (8 * more)) - 1));
        at += more;
        const u8 *source;
        if (!kind) { /* bytes as they are */
            if (more) length = number + 1;
            if (length > smaller(size - at, room - done)) return 0;
            source = raw + at;
            at += length;
        } else { /* bytes that came before */
            if (kind == 1) {
                length = (tag >> 2 & 7) + 4;
                number |= tag >> 5 << 8;
            }
            if (number <= 0 || number > done || length > room - done) return 0;
            source = into + done - number;
        }
        u8 *to = into + done;
        if (kind && number < 8)
            for (i64 n = 0; n < length; n++) to[n] = source[n];
        else
            for (i64 n = 0; n < length; n += 8) memcpy(to + n, source + n, 8);
        done += length;
    }
    return done == room;
}

/* Unpacks a page. 0: it is damaged, or does not become `room` bytes. */
i64 unpack_page(i64 codec, const u64 *functions, const u8 *source, i64 size, u8 *into,
                       i64 room) {
    if (codec == SNAPPY) return (int)unpack_snappy(source, size, into, room);
    if (codec < 0 || codec >= FUNCTIONS || !functions[codec]) return 0;
    Function unpack = (Function)functions[codec];
    if (codec == LZ4_RAW) return (i32)unpack((u64)source, (u64)into, (u64)size, (u64)room) == room;
    return codec == ZSTD && (i64)unpack((u64)into, (u64)room, (u64)source, (u64)size) == room;
}

/* Whether no value is missing, by the definition levels of a page: runs that repeat one level. */
i64 is_complete(const u8 *raw, i64 size, i64 rows) {
    i64 at = 0;
    while (rows > 0) {
        i64 head = varint(raw, &at, size);
        if (head < 2 || head & 1 || at >= size || raw[at] != 1) return 0;
        at++;
        rows -= head >> 1;
    }
    return 1;
}

/* Reads `count` indices of a page. 0: the page holds fewer, or is damaged. The page has the bits of
   an index, then runs. A run repeats one index, or packs groups of eight. */
i64 read_indices(const u8 *data, i64 size, i64 count, i32 *into) {
    i64 bits = data[0], at = 1;
    if (bits > 31) return 0;
    u64 mask = ((u64)1 << bits) - 1;
    while (count > 0) {
        i64 head = varint(data, &at, size), is_packed = head & 1, units = head >> 1;
        if (units <= 0 || units >= (i64)1 << 32) return 0;
        i64 stored = is_packed ? units * bits : (bits + 7) / 8;
        if (stored > size - at) return 0;
        i64 taken = smaller(count, is_packed ? 8 * units : units);
        if (is_packed) {
            const u8 *run = data + at;
            for (i64 n = 0; n < taken; n++) {
                u64 bit = (u64)n * (u64)bits;
                into[n] = (i32)((word_at(run + (bit >> 3)) >> (bit & 7)) & mask);
            }
        } else {
            u64 index = 0;
            for (i64 k = 0; k < stored; k++) index |= (u64)data[at + k] << (8 * k);
            if (index > INT32_MAX) return 0;
            for (i64 n = 0; n < taken; n++) into[n] = (i32)index;
        }
        count -= taken;
        into += taken;
        at += stored;
    }
    return 1;
}

/* Writes the values at these indices, which may begin at `into`, or in its second half. 0: an index
   is too large. */
static int look_up(const i32 *indices, i64 count, const u8 *known, i64 distinct, i64 width,
                   u8 *into) {
    i32 highest = 0;
    for (i64 n = 0; n < count; n++) highest = indices[n] > highest ? indices[n] : highest;
    if (highest >= distinct) return 0;
    if (width == 4)
        for (i64 n = 0; n < count; n++) memcpy(into + 4 * n, known + 4 * (u64)indices[n], 4);
    else
        for (i64 n = 0; n < count; n++) memcpy(into + 8 * n, known + 8 * (u64)indices[n], 8);
    return 1;
}

typedef struct {
    u64 pages;      /* where the bytes of its pages lie; 0: its values lie in memory */
    i64 size;       /* bytes of the pages */
    u64 dictionary; /* where its dictionary's page lies, if that is not the first page */
    i64 dictionary_size;
    u64 values; /* where its values lie in memory */
    i64 width, is_optional, codec;
    i64 skip, rows;           /* rows of its pages, of which the first `skip` are not wanted */
    i64 most;                 /* rows of the row group: no dictionary has more values */
    i64 kind, must_be_finite; /* what happens to its values (see place_rows.py) */
    i64 block, offset;        /* where batches have it */
    i64 state;                /* what became of it: one of the states */
} Column;

enum { PLACED, LEFT, DIFFERS, DAMAGED }; /* states. LEFT: this code does not understand it */

typedef struct {
    i64 kind, unpacked, stored, checksum, values, encoding, levels, encoding_2;
} Head;

/* Parses the head of a page at `at`, and moves `at` behind it. 0: there is none before `end`, or
   its page is not within `left` bytes from where the head begins. */
static int parse_head(const u8 *raw, i64 *at, i64 end, i64 left, Head *head) {
    i64 numbers[128][2], fields[128], begin = *at;
    memset(fields, 0xff, sizeof fields);
    i64 count = thrift_numbers(raw, *at, end, numbers, 128, at);
    for (i64 k = 0; k < count; k++) {
        i64 path = numbers[k][0], value = numbers[k][1];
        if (path < 64)
            fields[path] = path == 4 ? (i64)(u32)value : value;
        else if (path >> 6 == 5 + fields[1])
            fields[64 | (path & 63)] = value;
    }
    Head found = {fields[1],  fields[2],  fields[3],  fields[4],
                  fields[65], fields[66], fields[67], fields[68]};
    *head = found;
    return count >= 0 && found.stored > 0 && found.stored <= left - (*at - begin) &&
           found.values >= 0 && found.unpacked > 0;
}

/* The same for a page of a column of numbers. 0: the page is not understood. */
static int read_head(const u8 *raw, i64 *at, i64 end, const Column *c, Head *head) {
    return parse_head(raw, at, end, end - *at, head) && head->values <= c->most &&
           head->unpacked <= 9 * head->values + 128 &&
           (c->codec || head->stored == head->unpacked);
}

/* Finds the pages of a column between two places of a file, by their heads. Writes for each its
   first row, where it begins, its bytes without compression, and whether it needs the dictionary.
   The first entry is of the dictionary, or of nothing, and has row -1. After the last page comes
   the end of both. Returns the number of entries, or -1: a head is not understood, the pages have
   other than `rows` rows, or they are more than `most` entries. */
i64 find_pages(i64 file, i64 begin, i64 end, i64 rows, i64 (*pages)[4], i64 most) {
    enum { DATA = 0, DICTIONARY = 2, DATA_2 = 3, USUAL = 512 };
    u8 raw[1 << 15]; /* a head may have two texts */
    i64 row = 0, count = 1;
    if (most < 2) return -1;
    pages[0][0] = -1;
    pages[0][1] = begin;
    pages[0][2] = pages[0][3] = 0;
    while (begin < end && count + 1 < most) {
        Head head;
        i64 at = 0, size = pread((int)file, raw, (u64)smaller(USUAL, end - begin), begin);
        if (size <= 0 || !parse_head(raw, &at, size, end - begin, &head)) {
            at = 0;
            size = pread((int)file, raw, (u64)smaller(sizeof raw, end - begin), begin);
            if (size <= 0 || !parse_head(raw, &at, size, end - begin, &head)) return -1;
        }
        if (head.kind == DICTIONARY && count == 1 && !pages[0][2]) {
            pages[0][2] = head.unpacked;
        } else if ((head.kind == DATA || head.kind == DATA_2) && head.values <= rows - row) {
            pages[count][0] = row;
            pages[count][1] = begin;
            pages[count][2] = head.unpacked;
            i64 encoding = head.kind == DATA ? head.encoding : head.encoding_2;
            pages[count++][3] = encoding == 2 || encoding == 8;
            row += head.values;
        } else {
            return -1;
        }
        begin += at + head.stored;
    }
    pages[count][0] = row;
    pages[count][1] = begin;
    pages[count][2] = pages[count][3] = 0;
    return begin == end && row == rows ? count + 1 : -1;
}

/* Sets the state of columns by the heads of their pages. LEFT: one is of another kind. */
void check_heads(Column *columns, i64 count) {
    for (i64 n = 0; n < count; n++) {
        Column *c = &columns[n];
        i64 at = 0, rows = 0;
        for (c->state = PLACED; at < c->size && !c->state;) {
            Head head;
            if (!read_head((const u8 *)c->pages, &at, c->size, c, &head) ||
                (head.kind != 0 && head.kind != 2)) {
                c->state = LEFT;
                break;
            }
            rows += head.kind == 0 ? head.values : 0;
            at += head.stored;
        }
        if (rows != c->rows) c->state = LEFT;
    }
}

typedef struct {
    const u64 *functions;
    u8 *room; /* for an unpacked dictionary and page, twice 9 * most + 256 bytes */
    const u8 *known;
    i64 distinct; /* the dictionary of the column that is read, and its length */
} Reading;

/* Unpacks a page of values to `into`. Returns a state. */
static i64 read_values(const Reading *g, const Column *c, const Head *head, const u8 *body,
                       u8 *room, u8 *into) {
    i64 size = head->unpacked, want = head->values * c->width;
    if (c->is_optional && head->levels != 3) return LEFT; /* how levels are encoded */
    int is_plain = head->encoding == 0;
    if (c->codec) {
        u8 *to = is_plain && !c->is_optional ? into : room;
        if (to == into && size != want) return LEFT;
        if (!unpack_page(c->codec, g->functions, body, head->stored, to, size)) return DAMAGED;
        if (to == into) return PLACED;
        body = to;
    }
    if (c->is_optional) {
        i64 outside = size < 4 ? -1 : (i32)half_at(body);
        if (outside < 0 || outside > size - 5) return LEFT;
        if (!is_complete(body + 4, outside, head->values)) return LEFT;
        body += 4 + outside;
        size -= 4 + outside;
    }
    if (is_plain) {
        if (size != want) return LEFT;
        memcpy(into, body, (u64)want);
        return PLACED;
    }
    if (!g->known || (head->encoding != 2 && head->encoding != 8)) return LEFT;
    i32 *indices = (i32 *)(into + (c->width - 4) * head->values);
    if (!read_indices(body, size, head->values, indices)) return DAMAGED;
    if (!look_up(indices, head->values, g->known, g->distinct, c->width, into)) return DAMAGED;
    return PLACED;
}

/* Verifies and unpacks all pages between `raw` and `raw + end`. `row` is the rows so far. */
static i64 read_pages(Reading *g, const Column *c, const u8 *raw, i64 end, u8 *into, i64 *row) {
    u8 *room = g->room + (g->known ? 9 * c->most + 256 : 0);
    for (i64 at = 0; at < end;) {
        Head head;
        if (!read_head(raw, &at, end, c, &head)) return LEFT;
        const u8 *body = raw + at;
        at += head.stored;
        if (head.checksum >= 0) {
            Function checksum = (Function)g->functions[CHECKSUM];
            u64 sum = checksum(0, (u64)body, (u64)head.stored, 0);
            if ((u32)sum != (u64)head.checksum) return DIFFERS;
        }
        if (head.kind == 2) {
            if (*row || g->known || (head.encoding != 0 && head.encoding != 2)) return LEFT;
            if (!head.values || head.values * c->width != head.unpacked) return LEFT;
            g->known = body;
            if (c->codec) {
                if (!unpack_page(c->codec, g->functions, body, head.stored, room, head.unpacked))
                    return DAMAGED;
                g->known = room;
                room += 9 * c->most + 256;
            }
            g->distinct = head.values;
            continue;
        }
        if (head.kind != 0 || head.values > c->rows - *row) return LEFT;
        i64 state = read_values(g, c, &head, body, room, into + *row * c->width);
        if (state) return state;
        *row += head.values;
    }
    return PLACED;
}

/* ---- the order of rows */

/* Combines two permutations into the order of a window: entries beyond its `rows` are left out. */
void compose_order(const u32 *outer, const u32 *inner, i64 size, i64 rows, u64 *order) {
    for (i64 n = 0, count = 0; n < size && count < rows; n++) {
        u32 row = outer[inner[n]];
        if (row < (u64)rows) order[count++] = row;
    }
}

typedef struct {
    i64 window;     /* the rows of the window */
    i64 low, high;  /* these of its rows are read now */
    i64 start;      /* the first of them, among the rows that are read */
    i64 first;      /* the first row of the window in its stream */
    i64 lane;       /* where batches have the stream's rows */
    u64 outer, inner; /* the permutations that make the window's order; 0: rows come as stored */
    i64 size;
    u64 places; /* for each row its place in the order, in place of the permutations */
} Part;

typedef struct {
    i64 step, begin, end, is_line; /* is_line: the places follow each other */
} Run;

typedef struct {
    const u64 *functions;
    Column *columns;
    i64 column_count;
    i64 rows; /* that are read */
    const Part *parts;
    i64 part_count;
    i64 each;              /* rows of a stream in a batch */
    i64 first_step, steps; /* the batches that are there; rows of earlier ones are not needed */
    u64 (*targets)[4];     /* by batch and block: where its arrays begin */
    i64 *moved;            /* by batch: the rows that were moved there */
    u8 *room;              /* see Reading */
    u8 *wide;              /* 8 bytes for each row of pages */
    u32 *slots;            /* four columns, with `slot_size` words each */
    i64 slot_size;
    u32 *beside; /* four words a row */
    u32 *source, *place;
    Run *runs;
    i64 most_runs;
    const struct Bags *bags;
    i64 bag_count;
    i64 wrong; /* the column that is damaged */
    i64 run_count;
} Group;

static i64 add_run(Group *g, i64 step, i64 begin, i64 end, int is_line) {
    if (begin == end || step < g->first_step) return begin; /* as if they had not been there */
    Run run = {step - g->first_step, begin, end, is_line};
    g->runs[g->run_count++] = run;
    g->moved[run.step] += end - begin;
    return end;
}

/* Rows of a window that come as they are stored. */
static i64 order_stored(Group *g, const Part *p, i64 k) {
    for (i64 row = p->low; row < p->high;) {
        i64 step = (p->first + row) / g->each, inside = (p->first + row) % g->each;
        i64 count = smaller(g->each - inside, p->high - row);
        for (i64 n = 0; n < count; n++) {
            g->source[k + n] = (u32)(p->start + row - p->low + n);
            g->place[k + n] = (u32)(p->lane + inside + n);
        }
        k = add_run(g, step, k, k + count, 1);
        row += count;
    }
    return k;
}

/* All rows of the window pass by, and those that are read now stay. */
static i64 order_shuffled(Group *g, const Part *p, i64 k) {
    const u32 *outer = (const u32 *)p->outer, *inner = (const u32 *)p->inner;
    u32 low = (u32)p->low, width = (u32)(p->high - p->low), rows = (u32)p->window;
    u32 start = (u32)(p->start - p->low), *source = g->source, *place = g->place;
    i64 step = p->first / g->each, inside = p->first % g->each, entry = 0;
    for (i64 left = p->window; left > 0;) {
        i64 count = smaller(g->each - inside, left), begin = k, done = 0;
        u32 at = (u32)(p->lane + inside);
        while (done < count) {
            u32 row = outer[inner[entry++]];
            source[k] = row + start;
            place[k] = at + (u32)done;
            k += (row - low < width) & (row < rows);
            done += row < rows;
        }
        k = add_run(g, step, begin, k, k - begin == count);
        step++;
        inside = 0;
        left -= count;
    }
    return k;
}

/* Those of some rows of a window that lie in one batch, from the places of all its rows. */
static i64 order_batch(Group *g, const Part *p, i64 step, i64 low, i64 high, i64 k) {
    const u32 *places = (const u32 *)p->places;
    i64 from = step * g->each - p->first, begin = k;
    for (i64 row = low; row < high; row++) {
        i64 at = places[row] - from;
        g->source[k] = (u32)(p->start + row - p->low);
        g->place[k] = (u32)(p->lane + at);
        k += at >= 0 && at < g->each;
    }
    return add_run(g, step, begin, k, 0);
}

/* A small part of a window: batch by batch if its rows are in few batches, else row by row. */
static i64 order_few(Group *g, const Part *p, i64 k) {
    enum { FEW = 64 };
    const u32 *places = (const u32 *)p->places;
    i64 first = p->first / g->each, last = (p->first + p->window - 1) / g->each;
    if (last - first < FEW) {
        for (i64 step = first; step <= last; step++)
            k = order_batch(g, p, step, p->low, p->high, k);
        return k;
    }
    for (i64 row = p->low; row < p->high; row++)
        k = order_batch(g, p, (p->first + places[row]) / g->each, row, row + 1, k);
    return k;
}

/* ---- the move of rows to their places in batches */

static u32 *target_of(const Group *g, const Run *run, const Column *c) {
    return (u32 *)(g->targets[run->step][c->block] + (u64)c->offset);
}

static void move_column(const Group *g, const Column *c, const u32 *values) {
    for (i64 r = 0; r < g->run_count; r++) {
        const Run *run = &g->runs[r];
        u32 *to = target_of(g, run, c);
        for (i64 n = run->begin; n < run->end; n++) to[g->place[n]] = values[g->source[n]];
    }
}

#ifdef __SSE2__
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define STORE(to, value) _mm_storeu_si128((__m128i *)(to), value)

/* Transposes four times four words. */
static void transpose(__m128i four[4]) {
    __m128i a = _mm_unpacklo_epi32(four[0], four[1]), b = _mm_unpacklo_epi32(four[2], four[3]);
    __m128i c = _mm_unpackhi_epi32(four[0], four[1]), d = _mm_unpackhi_epi32(four[2], four[3]);
    four[0] = _mm_unpacklo_epi64(a, b);
    four[1] = _mm_unpackhi_epi64(a, b);
    four[2] = _mm_unpacklo_epi64(c, d);
    four[3] = _mm_unpackhi_epi64(c, d);
}
#endif

/* Lays the values of four columns side by side, so that one line of the cache serves all four. */
static void lay_beside(const u32 *const values[4], i64 rows, u32 *beside) {
    i64 n = 0;
#ifdef __SSE2__
    for (; n + 4 <= rows; n += 4) {
        __m128i four[4];
        for (int k = 0; k < 4; k++) four[k] = LOAD(values[k] + n);
        transpose(four);
        for (int k = 0; k < 4; k++) STORE(beside + 4 * (n + k), four[k]);
    }
#endif
    for (; n < rows; n++)
        for (int k = 0; k < 4; k++) beside[4 * n + k] = values[k][n];
}

static void move_four(const Group *g, const Column *const columns[4], const u32 *const values[4]) {
    const u32 *beside = g->beside;
    lay_beside(values, g->rows, g->beside);
    for (i64 r = 0; r < g->run_count; r++) {
        const Run *run = &g->runs[r];
        const u32 *source = g->source + run->begin, *place = g->place + run->begin;
        i64 count = run->end - run->begin, i = 0;
        u32 *a = target_of(g, run, columns[0]), *b = target_of(g, run, columns[1]);
        u32 *c = target_of(g, run, columns[2]), *d = target_of(g, run, columns[3]);
#ifdef __SSE2__
        u32 first = *place;
        for (; run->is_line && i + 4 <= count; i += 4) {
            __m128i four[4];
            for (int k = 0; k < 4; k++) four[k] = LOAD(beside + 4 * (u64)source[i + k]);
            transpose(four);
            STORE(a + first + i, four[0]);
            STORE(b + first + i, four[1]);
            STORE(c + first + i, four[2]);
            STORE(d + first + i, four[3]);
        }
#endif
        for (; i < count; i++) {
            const u32 *from = beside + 4 * (u64)source[i];
            u32 at = place[i];
            a[at] = from[0];
            b[at] = from[1];
            c[at] = from[2];
            d[at] = from[3];
        }
    }
}

/* Converts values of 8 bytes to 4 bytes. 0: one does not fit. */
static int narrow(i64 kind, const u8 *from, i64 count, u32 *into) {
    i64 lost = 0;
    for (i64 n = 0; n < count; n++) {
        u64 word = word_at(from + 8 * n);
        double number;
        float result;
        memcpy(&number, &word, 8);
        if (kind == LONGS_TO_IDS) {
            into[n] = (u32)word;
            lost += word > INT32_MAX;
            continue;
        }
        result = kind == DOUBLES_TO_FLOATS ? (float)number : (float)(i64)word;
        if (kind == DOUBLES_TO_FLOATS) lost += __builtin_isinf(result) && !__builtin_isinf(number);
        memcpy(&into[n], &result, 4);
    }
    return !lost;
}

/* Whether all words are what batches may hold: ids from 0 on, or finite numbers. */
static int is_good(const Column *c, const u32 *words, i64 count) {
    u32 bits = 0, infinite = 0;
    for (i64 n = 0; c->kind == IDS && n < count; n++) bits |= words[n];
    for (i64 n = 0; c->must_be_finite && n < count; n++)
        infinite |= (words[n] & 0x7f800000) == 0x7f800000;
    return !(bits >> 31) && !infinite;
}

/* Makes the words of a column as batches hold them, in the slot if they are not there already.
   Returns where they are. 0: the column is left, or damaged. */
static const u32 *make_words(Group *g, Column *c, u32 *slot) {
    int is_wide = c->kind >= DOUBLES_TO_FLOATS;
    const u8 *from = (const u8 *)c->values;
    if (c->pages) {
        Reading reading = {g->functions, g->room, 0, 0};
        u8 *into = is_wide ? g->wide : (u8 *)slot;
        i64 row = 0;
        const u8 *dictionary = (const u8 *)c->dictionary, *pages = (const u8 *)c->pages;
        c->state = read_pages(&reading, c, dictionary, c->dictionary_size, into, &row);
        if (!c->state) c->state = read_pages(&reading, c, pages, c->size, into, &row);
        if (!c->state && row != c->rows) c->state = LEFT;
        if (c->state) return 0;
        from = into + c->width * c->skip;
    }
    if (is_wide && !narrow(c->kind, from, g->rows, slot)) c->state = LEFT;
    if (!is_wide && (u64)from & 3) memcpy(slot, from, 4 * (u64)g->rows);
    const u32 *words = is_wide || (u64)from & 3 ? slot : (const u32 *)from;
    for (i64 n = 0; c->kind == WORDS_TO_FLOATS && n < g->rows; n++) {
        float number = (float)(int8_t)words[n];
        memcpy(&slot[c->skip + n], &number, 4);
    }
    if (!is_good(c, words, g->rows)) c->state = LEFT;
    return c->state ? 0 : words;
}

/* ---- bags of ids */

static u64 address_of(const u32 *low, const u32 *high, i64 n) {
    return (u64)high[n] << 32 | low[n];
}

typedef struct Bags {
    u64 begins, ends; /* addresses of offsets, by row that is read */
    i64 is_wide;      /* whether an offset has 8 bytes */
    i64 unit;         /* what it counts in bytes */
    u64 ids;
    u64 line; /* room for all ids, which are copied there in the order of batches; 0: they stay */
    i64 line_size;
    i64 lengths, low, high; /* where batches have lengths, and both halves of addresses */
} Bags;

static i64 offset_of(u64 offsets, i64 is_wide, u32 row) {
    return is_wide ? ((const i64 *)offsets)[row] : ((const i32 *)offsets)[row];
}

static void prefetch_lines(const u8 *from, i64 size) {
    enum { MOST = 384, LINE = 64 };
    for (i64 at = 0; at < size && at < MOST; at += LINE) __builtin_prefetch(from + at);
}

/* Writes the length and the address of each bag to its place. 0: the line is too short. */
static int place_bags(const Group *g, const Bags *bags) {
    enum { AHEAD = 6 };
    i64 done = 0;
    for (i64 r = 0; r < g->run_count; r++) {
        const Run *run = &g->runs[r];
        u8 *lengths = (u8 *)g->targets[run->step][2], *places = (u8 *)g->targets[run->step][3];
        for (i64 n = run->begin; n < run->end; n++) {
            u32 row = g->source[n], at = g->place[n];
            i64 begin = offset_of(bags->begins, bags->is_wide, row) * bags->unit;
            i64 size = offset_of(bags->ends, bags->is_wide, row) * bags->unit - begin;
            u64 address = bags->ids + (u64)begin;
            if (bags->line) {
                if (size > bags->line_size - done) return 0;
                if (n + AHEAD < run->end) {
                    u32 next = g->source[n + AHEAD];
                    i64 from = offset_of(bags->begins, bags->is_wide, next) * bags->unit;
                    prefetch_lines((const u8 *)bags->ids + from, size);
                }
                u8 *to = (u8 *)bags->line + done;
                if (size) memcpy(to, (const u8 *)address, (u64)size);
                address = (u64)to;
                done += size;
            }
            ((i32 *)(lengths + bags->lengths))[at] = (i32)(size / 4);
            ((u32 *)(places + bags->low))[at] = (u32)address;
            ((u32 *)(places + bags->high))[at] = (u32)(address >> 32);
        }
    }
    return 1;
}

/* Reads the columns of a row group, or of a piece of one, and moves its rows to their places in
   batches. Sets the state of each column. Returns the worst state of all, or -1: the memory that
   was given is too small. */
i64 place_rows(Group *g) {
    i64 k = 0, held = 0, worst = PLACED;
    g->run_count = 0;
    for (i64 n = 0; n < g->part_count; n++) {
        const Part *p = &g->parts[n];
        i64 width = p->high - p->low;
        if (width < 0 || p->start < 0 || p->start + width > g->rows || k + width > g->rows)
            return -1;
        if (p->window && (p->first + p->window - 1) / g->each - g->first_step >= g->steps)
            return -1;
        i64 runs = p->places ? width : smaller(width, p->window / g->each + 2);
        if (g->run_count + runs > g->most_runs) return -1;
        if (p->outer && p->size < p->window) return -1;
        k = p->places ? order_few(g, p, k)
                      : (p->outer ? order_shuffled(g, p, k) : order_stored(g, p, k));
    }
    const Column *four[4];
    const u32 *values[4];
    for (i64 n = 0; n < g->column_count; n++) {
        Column *c = &g->columns[n];
        if (c->skip < 0 || (c->pages && c->skip + g->rows > c->rows)) return -1;
        if (g->rows && !c->pages && !c->values) return -1;
        values[held] = make_words(g, c, g->slots + held * g->slot_size);
        if (c->state > worst) {
            worst = c->state;
            g->wrong = n;
        }
        if (!values[held]) continue;
        four[held++] = c;
        if (held < 4) continue;
        move_four(g, four, values);
        held = 0;
    }
    for (i64 n = 0; n < held; n++) move_column(g, four[n], values[n]);
    for (i64 n = 0; n < g->bag_count; n++)
        if (!place_bags(g, &g->bags[n])) return -1;
    return worst;
}

/* Copies bags to `into`, one after the other. Bags that lie one after the other are copied
 * together. */
void copy_bags(const i32 *lengths, const u32 *low, const u32 *high, i64 count, u8 *into) {
    enum { AHEAD = 6 };
    u64 begin = 0, end = 0;
    for (i64 n = 0; n < count; n++) {
        u64 source = address_of(low, high, n);
        if (source != end) {
            if (n + AHEAD < count)
                prefetch_lines((const u8 *)address_of(low, high, n + AHEAD),
                               4 * (i64)lengths[n + AHEAD]);
            if (end > begin) memcpy(into, (const void *)begin, end - begin);
            into += end - begin;
            begin = source;
        }
        end = source + 4 * (u64)lengths[n];
    }
    if (end > begin) memcpy(into, (const void *)begin, end - begin);
}

/* ---- hashes (sluice/etl/ops/hashing.py is their definition) */

static const u64 G = 0x9E3779B97F4A7C15, A = 0xD6E8FEB86659FD93;

static u64 absorb(u64 hash, u64 word) {
    hash = (hash ^ word) * A;
    return hash ^ hash >> 32;
}

static u64 absorb_text(u64 salt, const u8 *text, i64 size) {
    u64 hash = (salt ^ (u64)size) * G, word = 0;
    for (; size >= 8; size -= 8, text += 8) hash = absorb(hash, word_at(text));
    if (!size) return hash;
    memcpy(&word, text, (u64)size);
    return absorb(hash, word);
}

/* Hashes texts before the last mix. `wide`: offsets have 8 bytes. */
void hash_texts(const u8 *data, const void *offsets, i64 wide, i64 count, u64 salt, u64 *hashes) {
    for (i64 n = 0; n < count; n++) {
        i64 begin = wide ? ((const i64 *)offsets)[n] : ((const i32 *)offsets)[n];
        i64 end = wide ? ((const i64 *)offsets)[n + 1] : ((const i32 *)offsets)[n + 1];
        hashes[n] = absorb_text(salt, data + begin, end - begin);
    }
}

/* Hashes whole numbers as their decimal digits, before the last mix. */
void hash_digits(const u64 *bits, i64 is_signed, i64 count, u64 salt, u64 *hashes) {
    for (i64 n = 0; n < count; n++) {
        u8 digits[24];
        int is_negative = is_signed && bits[n] >> 63, at = 24;
        u64 rest = is_negative ? ~bits[n] + 1 : bits[n];
        do {
            digits[--at] = (u8)('0' + rest % 10);
            rest /= 10;
        } while (rest);
        if (is_negative) digits[--at] = '-';
        hashes[n] = absorb_text(salt, digits + at, 24 - at);
    }
}

/* ---- lines of text */

/* Reads a whole number of up to 18 digits. Returns whether it is one, or nothing. */
static int cut_number(const u8 *data, i64 *at, i64 *value) {
    i64 start = *at;
    int is_negative = data[start] == '-';
    i64 first = start + is_negative, end = first;
    u64 number = 0;
    while (data[end] >= '0' && data[end] <= '9') number = number * 10 + (u64)(data[end++] - '0');
    *at = end;
    *value = (i64)(is_negative ? -number : number);
    return (first < end && end <= first + 18) || end == start;
}

/* Reads a text up to a delimiter or the line's end. Returns whether its bytes are below `other`.
   Its value is a hash, for which a text of up to 8 bytes is the only one of its size. */
static int cut_text(const u8 *data, i64 *at, u8 delimiter, i64 other, i64 *value) {
    u64 hash = 0, word = 0, shift = 0;
    u8 byte = data[*at], most = byte;
    while (byte != delimiter && byte != '\n' && byte != '\r') {
        most = byte > most ? byte : most;
        word |= (u64)byte << shift;
        shift += 8;
        if (shift == 64) {
            hash = absorb(hash, word);
            word = shift = 0;
        }
        byte = data[++*at];
    }
    hash = ((hash ^ word) + shift + 1) * G;
    *value = (i64)(hash ^ hash >> 32);
    return most < other;
}

/* Finds the cells of each line (compiled_lines.py), and returns the number of regular lines. Arrays
   of cells have one row a column, with room for `lines` cells. A cell's value is its whole number,
   or the hash of its text. A missing cell has the size 0. `quote`: -1 for none. Bytes of texts are
   below `other`. */
i64 cut_lines(const u8 *data, const i32 *bounds, i64 lines, const u8 *is_int, i64 columns,
              i64 delimiter, i64 quote, i64 other, i32 *starts, i32 *sizes, i64 *values,
              u8 *irregular) {
    enum { MARK = 0xef }; /* how a byte order mark begins */
    i64 row = 0;
    for (i64 line = 0; line < lines; line++) {
        i64 at = bounds[line], end = bounds[line + 1] - 1, column = 0;
        int good = end >= at && data[end] == '\n' && data[at] != MARK;
        while (good && column < columns) {
            i64 start = at, cell = column++ * lines + row;
            good = data[at] != quote;
            good &= is_int[column - 1] ? cut_number(data, &at, &values[cell])
                                       : cut_text(data, &at, (u8)delimiter, other, &values[cell]);
            starts[cell] = (i32)start;
            sizes[cell] = (i32)(at - start);
            if (column < columns) {
                good &= data[at] == delimiter;
            } else {
                at += data[at] == '\r';
                good &= data[at] == '\n' && at == end;
            }
            at++;
        }
        irregular[line] = !good;
        row += good;
    }
    return row;
}

typedef struct {
    const u8 *data;
    const i32 *starts, *sizes;
    const u64 *hashes;
    i32 *first; /* by code: the row that had the text first */
} Texts;

static int is_same_text(const Texts *texts, i64 row, i64 other) {
    i64 size = texts->sizes[row];
    if (texts->hashes[row] != texts->hashes[other] || texts->sizes[other] != size) return 0;
    /* A hash of up to 8 bytes has only one text of that size. */
    const u8 *data = texts->data;
    return size <= 8 || !memcmp(data + texts->starts[row], data + texts->starts[other], (u64)size);
}

static void take_slot(i32 *slots, i64 mask, u64 hash, i64 code) {
    i64 slot = (i64)(hash & (u64)mask);
    while (slots[slot] >= 0) slot = (slot + 1) & mask;
    slots[slot] = (i32)code;
}

/* Gives each distinct text a code, in the order of their first rows. Returns their number, or -1:
   there is no memory. */
i64 encode_texts(const u8 *data, const i32 *starts, const i32 *sizes, const u64 *hashes, i64 rows,
                 i32 *codes, i32 *first) {
    Texts texts = {data, starts, sizes, hashes, first};
    i64 mask = 4095, count = 0;
    i32 *slots = malloc((u64)(mask + 1) * 4);
    if (!slots) return -1;
    memset(slots, 0xff, (u64)(mask + 1) * 4);
    for (i64 row = 0; row < rows; row++) {
        codes[row] = -1;
        if (!sizes[row]) continue;
        i64 slot = (i64)(hashes[row] & (u64)mask);
        for (; slots[slot] >= 0; slot = (slot + 1) & mask)
            if (is_same_text(&texts, row, first[slots[slot]])) break;
        if (slots[slot] >= 0) {
            codes[row] = slots[slot];
            continue;
        }
        slots[slot] = codes[row] = (i32)count;
        first[count++] = (i32)row;
        if (2 * count <= mask + 1) continue;
        mask = 2 * mask + 1;
        free(slots);
        slots = malloc((u64)(mask + 1) * 4);
        if (!slots) return -1;
        memset(slots, 0xff, (u64)(mask + 1) * 4);
        for (i64 code = 0; code < count; code++) take_slot(slots, mask, hashes[first[code]], code);
    }
    free(slots);
    return count;
}

/* Copies texts to `texts`: the n-th one ends at `ends[n + 1]`. */
void gather_texts(const u8 *data, const i32 *starts, const i32 *ends, i64 count, u8 *texts) {
    for (i64 n = 0; n < count; n++)
        memcpy(texts + ends[n], data + starts[n], (u64)(ends[n + 1] - ends[n]));
}
