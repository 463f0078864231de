/* [per path] Coefficients to samples: libjpeg's accurate integer inverse DCT (jidctint.c, "islow",
 * after Loeffler, Ligtenberg and Moschytz 1989), two blocks at a time, bit for bit.
 *
 * Out of any sane range it saturates or wraps, not always as libjpeg-turbo does. */
#ifndef TRAINYARD_IDCT_H
#define TRAINYARD_IDCT_H

/* Cosines and their sums, times 8192. */
enum {
    FIX_0_298 = 2446,
    FIX_0_390 = 3196,
    FIX_0_541 = 4433,
    FIX_0_765 = 6270,
    FIX_0_899 = 7373,
    FIX_1_175 = 9633,
    FIX_1_501 = 12299,
    FIX_1_847 = 15137,
    FIX_1_961 = 16069,
    FIX_2_053 = 16819,
    FIX_2_562 = 20995,
    FIX_3_072 = 25172
};

/* 1-D, in each lane, over the 8 rows; results are divided by 2 ** bits. */
static inline void idct_8(Lanes rows[8], int bits) {
    Wide half = wide_splat(1 << (bits - 1));
    Wide sum = wide_add(widen_13(add(rows[0], rows[4])), half);
    Wide difference = wide_add(widen_13(subtract(rows[0], rows[4])), half);
    Wide even_2 = rotate(rows[2], rows[6], FIX_0_541, FIX_0_541 - FIX_1_847);
    Wide even_3 = rotate(rows[2], rows[6], FIX_0_541 + FIX_0_765, FIX_0_541);
    Wide even[4] = {wide_add(sum, even_3), wide_add(difference, even_2),
                    wide_subtract(difference, even_2), wide_subtract(sum, even_3)};

    Lanes z3 = add(rows[7], rows[3]), z4 = add(rows[5], rows[1]);
    Wide z3_turned = rotate(z3, z4, FIX_1_175 - FIX_1_961, FIX_1_175);
    Wide z4_turned = rotate(z3, z4, FIX_1_175, FIX_1_175 - FIX_0_390);
    Wide odd[4] = {
        wide_add(rotate(rows[7], rows[1], -FIX_0_899, FIX_1_501 - FIX_0_899), z4_turned),
        wide_add(rotate(rows[5], rows[3], -FIX_2_562, FIX_3_072 - FIX_2_562), z3_turned),
        wide_add(rotate(rows[5], rows[3], FIX_2_053 - FIX_2_562, -FIX_2_562), z4_turned),
        wide_add(rotate(rows[7], rows[1], FIX_0_298 - FIX_0_899, -FIX_0_899), z3_turned)};

    for (int i = 0; i < 4; i++) {
        rows[i] = narrow(wide_add(even[i], odd[i]), bits);
        rows[7 - i] = narrow(wide_subtract(even[i], odd[i]), bits);
    }
}

/* Two blocks, dequantised and transformed; rows of `to_a` and `to_b` are `stride` bytes apart. */
static inline void idct_pair(const int16_t *a, const int16_t *b, const int16_t *quant,
                             uint8_t *to_a, uint8_t *to_b, size_t stride) {
    Lanes rows[8];
    for (int i = 0; i < 8; i++) {
        const int16_t *quants = quant + 8 * i;
        rows[i] = multiply(load_two(a + 8 * i, b + 8 * i), load_two(quants, quants));
    }
    idct_8(rows, 11); /* down the columns; 2 bits more are kept */
    transpose_two(rows);
    idct_8(rows, 18);
    transpose_two(rows);
    for (int i = 0; i < 8; i += 2)
        store_rows(rows[i], rows[i + 1], to_a + i * stride, to_b + i * stride, stride);
}

#endif
