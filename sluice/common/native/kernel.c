/* The inner loops of Sluice: pages of Parquet files, rows and bags on their way to batches, hashes,
   and lines of text. Python calls them through ctypes (`__init__.py`), without the interpreter's
   lock.

   All arguments are 64 bits wide: numbers, or addresses of contiguous arrays. A function keeps no
   state, starts no thread and takes no memory, but for `encode_texts`. Callers own all memory and
   say how large it is; every number that comes from a file is checked here before anything is read
   through it. Bits are the same on every machine: little-endian, no fused or reordered floating
   point (kernel_build.py has the options). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
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
enum { VALUES, INDICES, DICTIONARY };
enum { CHECKSUM = 0, SNAPPY = 1, ZSTD = 6, LZ4_RAW = 7, FUNCTIONS = 8 };
enum { READ_BEYOND = 8 }; /* bytes that may be read after the end of a page with indices */

typedef struct {
    u64 address;
    i64 size;
    i64 rows; /* 0: a dictionary, or no page */
    i64 form;
    i64 unpacked; /* its size once it is unpacked; 0: it is not compressed */
    i64 codec;
    i64 waits;    /* 1: it is unpacked when it is moved */
    i64 checksum; /* -1: it has none */
} Page;

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

/* Reads the heads of all pages of columns. `chunks` has for each column where its chunk begins and
   ends in `data`, the bytes of a value, the highest definition level, and the codec. Writes the
   pages of each column, `most` at most, and how many they are: 0 if anything is not understood.
   `waits`: values may be unpacked when they are moved. `numbers` has room for `many` pairs. Returns
   the bytes that unpacking the others takes. */
i64 page_heads(const u8 *data, const i64 (*chunks)[5], i64 columns, i64 rows, i64 waits,
               Page *pages, i64 most, i64 *counts, i64 (*numbers)[2], i64 many) {
    i64 room = 0;
    for (i64 c = 0; c < columns; c++) {
        i64 at = chunks[c][0], end = chunks[c][1], width = chunks[c][2], optional = chunks[c][3];
        i64 codec = chunks[c][4], left = rows, n = 0, has_dictionary = 0;
        while (at < end && n < most) {
            i64 head[128];
            memset(head, 0xff, sizeof head);
            i64 size = thrift_numbers(data, at, end, numbers, many, &at);
            for (i64 k = 0; k < size; k++) {
                i64 path = numbers[k][0], value = numbers[k][1];
                if (path < 64)
                    head[path] = path == 4 ? (i64)(u32)value : value;
                else if (path >> 6 == 5 + head[1])
                    head[64 | (path & 63)] = value;
            }
            i64 kind = head[1], unpacked = head[2], stored = head[3], values = head[65],
                encoding = head[66];
            i64 form = encoding ? INDICES : VALUES;
            if (size < 0 || stored <= 0 || stored > end - at || values < 0 || values > rows) break;
            if (unpacked <= 0 || unpacked > 9 * values + 128 || (!codec && stored != unpacked))
                break;
            if (kind == 2) {
                if (n || (encoding != 0 && encoding != 2) || values * width != unpacked) break;
                form = DICTIONARY;
                has_dictionary = values > 0;
                values = 0;
            } else {
                int known = encoding == 0 || (has_dictionary && (encoding == 2 || encoding == 8));
                if (kind != 0 || !known || (optional && head[67] != 3))
                    break; /* how levels are encoded */
            }
            Page *page = &pages[c * most + n++];
            page->address = (u64)data + (u64)at;
            page->size = stored;
            page->rows = values;
            page->form = form;
            page->unpacked = codec > 0 ? unpacked : 0;
            page->codec = codec;
            page->checksum = head[4];
            page->waits = waits && codec > SNAPPY && form == VALUES && !optional;
            if (!page->waits) room += page->unpacked + READ_BEYOND;
            left -= values;
            at += stored;
        }
        if (at == end && !left) counts[c] = n;
    }
    return room;
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

/* Verifies checksums, and unpacks pages to `room`, each with READ_BEYOND bytes more, except those
   that wait. Takes the levels away. Sets a count to 0 if a value is missing, or sizes contradict
   each other. Returns 0, or 1 + c if a page of column c differs from its checksum, or -1 - c if one
   cannot be unpacked. */
i64 prepare_pages(const i64 (*chunks)[5], i64 columns, Page *pages, i64 most, i64 *counts, u8 *room,
                  const u64 *functions) {
    for (i64 c = 0; c < columns; c++) {
        i64 width = chunks[c][2], optional = chunks[c][3];
        for (i64 k = 0; k < counts[c]; k++) {
            Page *page = &pages[c * most + k];
            const u8 *source = (const u8 *)page->address;
            i64 size = page->size;
            if (page->checksum >= 0) {
                Function checksum = (Function)functions[CHECKSUM];
                if ((u32)checksum(0, (u64)source, (u64)size, 0) != (u64)page->checksum)
                    return 1 + c;
            }
            if (page->unpacked && !page->waits) {
                if (!unpack_page(page->codec, functions, source, size, room, page->unpacked))
                    return -1 - c;
                source = room;
                size = page->unpacked;
                room += size + READ_BEYOND;
            }
            if (optional && page->form != DICTIONARY) {
                i64 outside = size < 4 ? -1 : (i32)half_at(source);
                if (outside < 0 || outside > size - 5 ||
                    !is_complete(source + 4, outside, page->rows)) {
                    counts[c] = 0;
                    break;
                }
                source += 4 + outside;
                size -= 4 + outside;
            }
            i64 values = page->waits ? page->unpacked : size;
            if (!size || (page->form == VALUES && values != page->rows * width)) {
                counts[c] = 0;
                break;
            }
            page->address = (u64)source;
            page->size = size;
        }
    }
    return 0;
}

/* Reads `count` indices of a page, after `skip` others. 0: the page holds fewer, or is damaged. The
   page has the bits of an index, then runs. A run repeats one index, or packs groups of eight. */
i64 read_indices(const u8 *data, i64 size, i64 skip, i64 count, i32 *into) {
    i64 bits = data[0], at = 1;
    if (bits > 31) return 0;
    u64 mask = ((u64)1 << bits) - 1;
    while (count > 0) {
        i64 head = varint(data, &at, size), is_packed = head & 1, units = head >> 1;
        if (units <= 0 || units >= (i64)1 << 32) return 0;
        i64 stored = is_packed ? units * bits : (bits + 7) / 8;
        if (stored > size - at) return 0;
        i64 rows = is_packed ? 8 * units : units, low = smaller(skip, rows);
        i64 taken = smaller(count, rows - low);
        if (is_packed) {
            const u8 *run = data + at;
            for (i64 n = 0; n < taken; n++) {
                u64 bit = (u64)(low + n) * (u64)bits;
                into[n] = (i32)((word_at(run + (bit >> 3)) >> (bit & 7)) & mask);
            }
        } else {
            u64 index = 0;
            for (i64 k = 0; k < stored; k++) index |= (u64)data[at + k] << (8 * k);
            if (index > INT32_MAX) return 0;
            for (i64 n = 0; n < taken; n++) into[n] = (i32)index;
        }
        skip -= low;
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

/* Unpacks the values of the rows from `start` to `stop` of a column with `count` pages. 0: a page
   is damaged, or a page that waits is not wanted as a whole. */
i64 unpack_rows(const Page *pages, i64 count, i64 start, i64 stop, i64 width, u8 *into,
                const u64 *functions) {
    i64 row = 0, distinct = 0;
    const u8 *known = 0;
    for (i64 n = 0; n < count; n++) {
        const Page *page = &pages[n];
        const u8 *source = (const u8 *)page->address;
        if (page->form == DICTIONARY) {
            known = source;
            distinct = page->size / width;
            continue;
        }
        i64 low = larger(start - row, 0), high = smaller(stop - row, page->rows), rows = high - low;
        row += page->rows;
        if (rows <= 0) continue;
        if (page->waits) {
            if (rows < page->rows ||
                !unpack_page(page->codec, functions, source, page->size, into, page->unpacked))
                return 0;
        } else if (page->form == VALUES) {
            memcpy(into, source + width * low, (u64)(width * rows));
        } else {
            i32 *indices = (i32 *)(into + (width - 4) * rows);
            if (!read_indices(source, page->size, low, rows, indices)) return 0;
            if (!look_up(indices, rows, known, distinct, width, into)) return 0;
        }
        into += width * rows;
    }
    return 1;
}

/* ---- the move of rows to their places in batches */

/* Combines two permutations into the order of a window: entries beyond its `rows` are left out. */
void compose_order(const u64 *outer, const u64 *inner, i64 size, i64 rows, u64 *order) {
    for (i64 n = 0, count = 0; n < size && count < rows; n++) {
        u64 row = outer[inner[n]];
        if (row < (u64)rows) order[count++] = row;
    }
}

typedef struct {
    i64 chunk, step, steps, at, width, row; /* see PLACE_FIELDS */
} Place;

typedef struct {
    const u64 *order; /* 0: rows come as they are stored */
    const Place *places;
    i64 count;
    const u64 *targets; /* by chunk and column */
    const i64 *strides;
    i64 columns;
} Plan;

static u8 *target_of(const Plan *plan, const Place *place, i64 step, i64 column) {
    u64 begin = plan->targets[place->chunk * plan->columns + column];
    return (u8 *)begin + step * plan->strides[column] + 4 * place->at;
}

static void move_column(const Plan *plan, const u32 *values, i64 column) {
    for (i64 m = 0; m < plan->count; m++) {
        const Place *place = &plan->places[m];
        i64 row = place->row;
        for (i64 s = place->step; s < place->step + place->steps; s++, row += place->width) {
            u32 *target = (u32 *)target_of(plan, place, s, column);
            if (plan->order)
                for (i64 n = 0; n < place->width; n++) target[n] = values[plan->order[row + n]];
            else
                memcpy(target, values + row, 4 * (u64)place->width);
        }
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

/* Moves four columns from `column` on. Their values are laid side by side first, so that one line
   of the cache serves all four. `values` has the columns one after the other, with `rows` values
   each. */
static void move_four(const Plan *plan, const u32 *values, i64 rows, u32 *beside, i64 column) {
    i64 n = 0;
#ifdef __SSE2__
    for (; n + 4 <= rows; n += 4) {
        __m128i four[4];
        for (int k = 0; k < 4; k++) four[k] = LOAD(values + k * rows + n);
        transpose(four);
        for (int k = 0; k < 4; k++) STORE(beside + 4 * (n + k), four[k]);
    }
#endif
    for (; n < rows; n++)
        for (int k = 0; k < 4; k++) beside[4 * n + k] = values[k * rows + n];
    for (i64 m = 0; m < plan->count; m++) {
        const Place *place = &plan->places[m];
        const u64 *order = plan->order + place->row;
        for (i64 s = place->step; s < place->step + place->steps; s++, order += place->width) {
            u32 *to[4];
            for (int k = 0; k < 4; k++) to[k] = (u32 *)target_of(plan, place, s, column + k);
            i64 i = 0;
#ifdef __SSE2__
            for (; i + 4 <= place->width; i += 4) {
                __m128i four[4];
                for (int k = 0; k < 4; k++) four[k] = LOAD(beside + 4 * order[i + k]);
                transpose(four);
                for (int k = 0; k < 4; k++) STORE(to[k] + i, four[k]);
            }
#endif
            for (; i < place->width; i++)
                for (int k = 0; k < 4; k++) to[k][i] = beside[4 * order[i] + (u64)k];
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

/* Makes what batches hold of the words of a column, in place. 0: an id is below 0. */
static int convert(i64 kind, u32 *words, i64 count) {
    i32 least = 0;
    for (i64 n = 0; kind == IDS && n < count; n++) least = (i32)smaller(least, (i32)words[n]);
    for (i64 n = 0; kind == WORDS_TO_FLOATS && n < count; n++) {
        float number = (float)(int8_t)words[n];
        memcpy(&words[n], &number, 4);
    }
    return least >= 0;
}

/* Unpacks and converts one column of all pieces to `words`. Returns 0, or what `scatter` does. */
static i64 make_column(const Page *pages, i64 most, i64 pieces, i64 columns, i64 c,
                       const i64 *starts, const i64 *ends, const i64 *kinds, const u64 *functions,
                       u8 *wide, u32 *words) {
    i64 start = 0;
    for (i64 p = 0; p < pieces; start = ends[p++]) {
        i64 kind = kinds[p * columns + c], count = ends[p] - start;
        int is_wide = kind >= DOUBLES_TO_FLOATS;
        u8 *into = is_wide ? wide : (u8 *)(words + start);
        const Page *first = pages + (p * columns + c) * most;
        if (!unpack_rows(first, most, starts[p], starts[p] + count, is_wide ? 8 : 4, into,
                         functions))
            return 1 + p * columns + c;
        if (!(is_wide ? narrow(kind, wide, count, words + start)
                      : convert(kind, words + start, count)))
            return -1 - c;
    }
    return 0;
}

/* Moves rows of several columns (`scatter` in scatter_kernel.py). `room` has 40 bytes a row: 8 for
   values of 8 bytes, and twice 16 for four columns. Returns 0, or 1 + p * columns + c if a page of
   column c in piece p is damaged, or -1 - c if a value of column c does not fit. */
i64 scatter(u8 *room, const u64 *functions, const Page *pages, i64 most, i64 pieces, i64 columns,
            const i64 *starts, const i64 *ends, const i64 *kinds, const u64 *order,
            const Place *places, i64 count, const u64 *targets, const i64 *strides) {
    Plan plan = {order, places, count, targets, strides, columns};
    i64 rows = ends[pieces - 1];
    u32 *values = (u32 *)(room + 8 * rows), *beside = values + 4 * rows;
    i64 held = 0;
    for (i64 c = 0; c < columns; c++) {
        i64 wrong = make_column(pages, most, pieces, columns, c, starts, ends, kinds, functions,
                                room, values + held * rows);
        if (wrong) return wrong;
        held++;
        if (held == 4 && order) {
            move_four(&plan, values, rows, beside, c - 3);
            held = 0;
        } else if (c + 1 == columns || !order) {
            for (i64 k = 0; k < held; k++) move_column(&plan, values + k * rows, c + 1 - held + k);
            held = 0;
        }
    }
    return 0;
}

/* ---- bags of ids */

static u64 address_of(const u32 *low, const u32 *high, i64 n) {
    return (u64)high[n] << 32 | low[n];
}

static void set_address(u32 *low, u32 *high, i64 n, u64 address) {
    low[n] = (u32)address;
    high[n] = (u32)(address >> 32);
}

/* Finds for each row of the order its piece and its row there. The rows of piece p end before row
   `ends[p]`. */
void find_pieces(const u64 *order, i64 count, const i64 *ends, i64 many, u32 *pieces, u32 *rows) {
    for (i64 n = 0; n < count; n++) {
        i64 low = 0, high = many - 1;
        while (low < high) {
            i64 middle = (low + high) / 2;
            if ((i64)order[n] < ends[middle])
                high = middle;
            else
                low = middle + 1;
        }
        pieces[n] = (u32)low;
        rows[n] = (u32)((i64)order[n] - (low ? ends[low - 1] : 0));
    }
}

typedef struct {
    u64 begins, ends; /* addresses of offsets */
    i64 is_wide;      /* whether an offset has 8 bytes */
    i64 unit;         /* what it counts in bytes */
    u64 ids;
} Bags;

static i64 offset_of(u64 offsets, i64 is_wide, u32 row) {
    return is_wide ? ((const i64 *)offsets)[row] : ((const i32 *)offsets)[row];
}

/* Finds the length and the address of each bag: bag `rows[n]` of part `pieces[n]`. */
void find_bags(const Bags *parts, const u32 *pieces, const u32 *rows, i64 count, i32 *lengths,
               u32 *low, u32 *high) {
    for (i64 n = 0; n < count; n++) {
        const Bags *part = &parts[pieces[n]];
        i64 begin = offset_of(part->begins, part->is_wide, rows[n]) * part->unit;
        i64 end = offset_of(part->ends, part->is_wide, rows[n]) * part->unit;
        lengths[n] = (i32)((end - begin) / 4);
        set_address(low, high, n, part->ids + (u64)begin);
    }
}

/* Copies bags to `into`, one after the other. Bags that lie one after the other are copied
 * together. */
void copy_bags(const i32 *lengths, const u32 *low, const u32 *high, i64 count, u8 *into) {
    enum { AHEAD = 6, MOST_LINES = 6, LINE = 64 };
    u64 begin = 0, end = 0;
    for (i64 n = 0; n < count; n++) {
        u64 source = address_of(low, high, n);
        if (source != end) {
            for (i64 line = 0; n + AHEAD < count && line < MOST_LINES; line++) {
                if (line > 4 * (i64)lengths[n + AHEAD] / LINE) break;
                __builtin_prefetch(
                    (const void *)(address_of(low, high, n + AHEAD) + (u64)(LINE * line)));
            }
            if (end > begin) memcpy(into, (const void *)begin, end - begin);
            into += end - begin;
            begin = source;
        }
        end = source + 4 * (u64)lengths[n];
    }
    if (end > begin) memcpy(into, (const void *)begin, end - begin);
}

/* Sets the address of each bag as if they lay one after the other from `address` on. */
void lay_in_line(const i32 *lengths, i64 count, u64 address, u32 *low, u32 *high) {
    for (i64 n = 0; n < count; n++) {
        set_address(low, high, n, address);
        address += 4 * (u64)lengths[n];
    }
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
