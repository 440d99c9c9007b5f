// Which n-grams of benchmarks a text holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "minhash.h"
#include "words.h"

namespace trainkit {

class BenchmarkIndex {
  public:
    explicit BenchmarkIndex(std::size_t n) : n_(n) {}

    // `words` of one entry; of a shorter one than n all of them are one gram. Returns its grams.
    std::size_t add(std::string_view text, const std::vector<Word>& words, std::uint32_t entry) {
        if (words.empty())
            return 0;
        const std::size_t n = std::min(n_, words.size());
        if (std::find(sizes_.begin(), sizes_.end(), n) == sizes_.end())
            sizes_.push_back(n);
        const std::vector<std::uint64_t> found = shingles(text, words, n);
        for (const std::uint64_t gram : found) {
            Owner& owner = grams_.try_emplace(gram, Owner{entry, entry, 0}).first->second;
            if (owner.entries == 0 || owner.last != entry)
                owner.entries += 1;
            owner.last = entry;
        }
        return found.size();
    }

    // Grams that stand in more than `most` entries are nobody's: phrases of prompts, licences.
    std::size_t forget_common(std::size_t most) {
        std::size_t gone = 0;
        for (auto at = grams_.begin(); at != grams_.end();) {
            const bool common = at->second.entries > most;
            gone += common;
            at = common ? grams_.erase(at) : std::next(at);
        }
        return gone;
    }

    struct Match {
        std::uint32_t entry;
        std::size_t word;   // the first
        std::size_t words;  // of the gram
    };

    // The first gram of each size that the words hold; the longest size first.
    std::vector<Match> find(std::string_view text, const std::vector<Word>& words) const {
        std::vector<Match> matches;
        for (const std::size_t n : sizes_) {
            const std::vector<std::uint64_t> found = shingles(text, words, n);
            for (std::size_t i = 0; i < found.size(); ++i) {
                const auto gram = grams_.find(found[i]);
                if (gram != grams_.end()) {
                    matches.push_back({gram->second.first, i, n});
                    break;
                }
            }
        }
        std::sort(matches.begin(), matches.end(),
                  [](const Match& a, const Match& b) { return a.words > b.words; });
        return matches;
    }

  private:
    struct Owner {
        std::uint32_t first;
        std::uint32_t last;
        std::uint32_t entries;
    };

    std::size_t n_;
    std::vector<std::size_t> sizes_;
    std::unordered_map<std::uint64_t, Owner> grams_;
};

}  // namespace trainkit
