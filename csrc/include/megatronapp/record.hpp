/// The 32-byte trace record; the numpy type `megatronapp_common.trace.RECORD` describes the same bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megatronapp/layout.hpp"

namespace megatronapp {

inline constexpr std::uint64_t kDurationUnitNs = 8;
inline constexpr std::uint64_t kMaxDurationUnits = 0xFFFF'FFFF;
inline constexpr std::uint8_t kFlagSaturated = 1;

struct Span {
    std::uint64_t start_ns;
    std::uint64_t duration_ns;
    std::uint32_t step;
    std::uint32_t ordinal;
    std::uint32_t aux;
    std::uint16_t comm;
    std::uint16_t microbatch;
    std::uint8_t kind;
    std::uint8_t chunk;
    std::uint8_t layer;
    std::uint8_t flags;
};

/// Durations are rounded down to 8 ns; one over 34 s becomes the largest and sets the flag.
[[nodiscard]] constexpr Item<kRecordWords> pack(const Span& span) noexcept {
    const std::uint64_t units = span.duration_ns / kDurationUnitNs;
    const bool saturated = units > kMaxDurationUnits;
    const std::uint64_t flags = span.flags | (saturated ? kFlagSaturated : 0U);
    return {
        span.start_ns,
        std::min(units, kMaxDurationUnits) | std::uint64_t{span.step} << 32U,
        span.ordinal | std::uint64_t{span.aux} << 32U,
        span.comm | std::uint64_t{span.microbatch} << 16U | std::uint64_t{span.kind} << 32U |
            std::uint64_t{span.chunk} << 40U | std::uint64_t{span.layer} << 48U | flags << 56U,
    };
}

}  // namespace megatronapp
