// e to the power of x in vectors: no branch, no table, no call.
#pragma once

#include "common.h"

namespace trainkit {

// To 2 units in the last place. With n = round(x / ln 2), e^x = 2^n e^(x - n ln 2), the second
// factor by the polynomial of Cephes' expf (S. Moshier). 2^n in two factors: the result may be
// subnormal, 0 or inf where the true one is. NaN stays NaN.
TRAINKIT_INLINE float exponential(float x) {
    const float magic = 0x1.8p23f;  // a sum with it is rounded to a whole number
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = x * 0x1.715476p+0f + magic;
    const int32_t n = bits_as<int32_t>(shifted) - bits_as<int32_t>(magic);
    const float whole = shifted - magic;
    const float r = x - whole * 0x1.63p-1f + whole * 0x1.bd0106p-13f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t half = n >> 1;
    const float first = bits_as<float>(uint32_t(half + 127) << 23);
    const float second = bits_as<float>(uint32_t(n - half + 127) << 23);
    return p * first * second;
}

TRAINKIT_INLINE double exponential(double x) {
    return std::exp(x);
}
}  // namespace trainkit
