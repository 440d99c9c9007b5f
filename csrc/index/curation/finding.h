// What a rule says of a text that it does not let through.
#pragma once

#include <optional>
#include <string>

namespace trainkit {

struct Finding {
    std::string reason;
    double value;
    double limit;
};

using Verdict = std::optional<Finding>;

// A rule "value must not be above limit"; 0: not asked.
inline bool above(Verdict& verdict, const char* reason, double value, double limit) {
    if (limit != 0 && value > limit)
        verdict = Finding{reason, value, limit};
    return verdict.has_value();
}

inline bool below(Verdict& verdict, const char* reason, double value, double limit) {
    if (limit != 0 && value < limit)
        verdict = Finding{reason, value, limit};
    return verdict.has_value();
}

}  // namespace trainkit
