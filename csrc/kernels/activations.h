// SiLU and both forms of GELU, each as f(x) = x share(x), and their slopes. No branch, no table:
// loops over them are vectors. In fp64 they are the standard library's functions.
//
// In fp32 f is right to 5 units in the last place for x > -1 (slopes: to 3e-7) and to a relative
// 2e-5 where it runs out towards 0, which is reached at 1e-36; torch's forms by tanh and 1 + erf
// keep no digit there. An infinite x gives what the formula gives, as in torch: NaN of 0 times inf.
#pragma once

#include "common.h"
#include "exponential.h"

#include <string>

namespace trainkit {

template <class A>
struct Curve {
    A share;
    A slope;
};

template <class A>
TRAINKIT_INLINE A at_most(A x, A most) {  // one instruction, which leaves NaN
    return most < x ? most : x;
}

// e to the power of an x <= 0, in half the instructions of `exponential`: 2^n comes from the low
// bits of a sum that rounds to whole numbers, and what is below fp32's normal numbers is 0.
TRAINKIT_INLINE float decay(float x) {
    const float magic = 0x1.8p23f + 127.0f;  // 127: n as fp32 writes an exponent
    const float shifted = x * 0x1.715476p+0f + magic;
    const float whole = shifted - magic;
    const float r = x - whole * 0x1.63p-1f + whole * 0x1.bd0106p-13f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const float e = p * bits_as<float>(bits_as<uint32_t>(shifted) << 23);
    return x < -87.0f ? 0.0f : e;
}

TRAINKIT_INLINE double decay(double x) {
    return std::exp(x);
}

// s(x) = 1 / (1 + exp(-x)) and s(x) s(-x), which is its slope: of exp(-|x|), which does not
// overflow and leaves nothing to cancel.
template <class A>
TRAINKIT_INLINE Curve<A> logistic(A x) {
    const A e = decay(-std::abs(x));
    const A inverse = A(1) / (A(1) + e);
    return {x < A(0) ? e * inverse : inverse, e * inverse * inverse};
}

struct Silu {
    template <class A>
    static TRAINKIT_INLINE Curve<A> at(A x) {
        const Curve<A> s = logistic(x);
        return {s.share, s.share + x * s.slope};
    }
};

// GELU as GPT-2 has it (Hendrycks and Gimpel 2016, arXiv:1606.08415):
//   x (1 + tanh u) / 2 = x s(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3).
struct TanhGelu {
    template <class A>
    static TRAINKIT_INLINE Curve<A> at(A x) {
        const A square = at_most(x * x, A(2500));  // the share is 0 or 1 beyond, in fp64 too
        const Curve<A> s = logistic(A(1.5957691216057308) * x * (A(1) + A(0.044715) * square));
        const A rise = A(1.5957691216057308) * (A(1) + A(0.134145) * square);
        return {s.share, s.share + x * s.slope * rise};
    }
};

// exp(a^2) erfc(a) for 0 <= a <= 10.7, to 4e-8: (1 + 2 a) times it is a polynomial of
// (a - 2) / (a + 2), fitted for this file by weighted least squares.
TRAINKIT_INLINE float scaled_erfc(float a) {
    const float ends = 1.0f + 2.0f * a;
    const float inverse = 1.0f / ((a + 2.0f) * ends);
    const float q = (a - 2.0f) * ends * inverse;
    float p = -3.93914816e-4f;
    p = p * q - 1.21866714e-3f;
    p = p * q + 1.31200079e-3f;
    p = p * q + 8.62221513e-3f;
    p = p * q - 8.06133728e-3f;
    p = p * q - 5.42017668e-2f;
    p = p * q + 1.64055794e-1f;
    p = p * q - 1.66031644e-1f;
    p = p * q - 9.27640051e-2f;
    p = p * q + 1.27697837f;
    return p * (a + 2.0f) * inverse;
}

// GELU itself: the share is the normal distribution's, erfc(-x / sqrt(2)) / 2.
struct ErfGelu {
    static TRAINKIT_INLINE Curve<float> at(float x) {
        const float bell = decay(-0.5f * x * x);
        const float tail = 0.5f * bell * scaled_erfc(at_most(std::abs(x) * 0.70710678f, 10.7f));
        const float s = x < 0.0f ? tail : 1.0f - tail;
        return {s, s + x * bell * 0.39894228f};
    }
    static TRAINKIT_INLINE Curve<double> at(double x) {
        const double s = 0.5 * std::erfc(-x * 0.70710678118654752);
        return {s, s + x * std::exp(-0.5 * x * x) * 0.39894228040143268};
    }
};

// Calls body(TanhGelu{}) or body(ErfGelu{}) by torch's word for them.
template <class Body>
void for_gelu(const std::string& approximate, const char* operation, const Body& body) {
    if (approximate == "tanh") {
        return body(TanhGelu{});
    }
    STD_TORCH_CHECK(approximate == "none", "trainkit::", operation, ": approximate is '",
                    approximate, "', not 'none' or 'tanh'");
    body(ErfGelu{});
}
}  // namespace trainkit
