#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megatronapp/transport/shm/checked_ring.hpp"

namespace megatronapp::transport {

/// A map from 64-bit keys to 32-bit numbers without allocation per entry: open addressing with linear probing and
/// backward-shift deletion (Knuth, The Art of Computer Programming, volume 3, 6.4, algorithm R).
class KeyTable {
  public:
    explicit KeyTable(std::uint64_t expected = 16) {
        std::uint64_t places = 16;
        while (places < 2 * expected) {
            places *= 2;
        }
        places_.resize(places);
    }

    /// Whether the key was new; an entry that is there already stays as it is.
    bool insert(std::uint64_t key, std::uint32_t value) {
        if (2 * (size_ + 1) > places_.size()) {
            grow();
        }
        Place& place = places_[find(key)];
        if (place.used) {
            return false;
        }
        place = {key, value, true};
        ++size_;
        return true;
    }

    [[nodiscard]] bool contains(std::uint64_t key) const noexcept { return places_[find(key)].used; }

    [[nodiscard]] std::optional<std::uint32_t> find_value(std::uint64_t key) const noexcept {
        const Place& place = places_[find(key)];
        return place.used ? std::optional(place.value) : std::nullopt;
    }

    /// Removes the key; its value, if it was there.
    std::optional<std::uint32_t> take(std::uint64_t key) noexcept {
        const std::uint64_t at = find(key);
        if (!places_[at].used) {
            return std::nullopt;
        }
        const std::uint32_t value = places_[at].value;
        close_gap(at);
        --size_;
        return value;
    }

    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  private:
    struct Place {
        std::uint64_t key = 0;
        std::uint32_t value = 0;
        bool used = false;
    };

    [[nodiscard]] std::uint64_t home(std::uint64_t key) const noexcept { return mix(0, key) & (places_.size() - 1); }
    [[nodiscard]] std::uint64_t after(std::uint64_t at) const noexcept { return (at + 1) & (places_.size() - 1); }

    /// The place of the key, or the free one where it would be put. At least half of the places are free.
    [[nodiscard]] std::uint64_t find(std::uint64_t key) const noexcept {
        std::uint64_t at = home(key);
        while (places_[at].used && places_[at].key != key) {
            at = after(at);
        }
        return at;
    }

    void close_gap(std::uint64_t gap) noexcept {
        for (std::uint64_t at = after(gap); places_[at].used; at = after(at)) {
            const std::uint64_t mask = places_.size() - 1;
            const std::uint64_t from_home = (at - home(places_[at].key)) & mask;
            if (from_home >= ((at - gap) & mask)) {
                places_[gap] = places_[at];
                gap = at;
            }
        }
        places_[gap].used = false;
    }

    void grow() {
        std::vector<Place> old(2 * places_.size());
        old.swap(places_);
        for (const Place& place : old) {
            if (place.used) {
                places_[find(place.key)] = place;
            }
        }
    }

    std::vector<Place> places_;
    std::uint64_t size_ = 0;
};

}  // namespace megatronapp::transport
