#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace megatronapp::transport::ucx {

/// How far a peer's monotonic clock is from this rank's, estimated from exchanged times as in NTP: a beat is taken to
/// have left the peer half a round trip ago, so the error is at most half the shortest of the last round trips.
class ClockDistance {
  public:
    /// A beat that the peer sent at `peer_ns` of its clock arrived at `now_ns` of this one.
    void measured(std::uint64_t peer_ns, std::uint64_t now_ns, std::uint64_t round_trip_ns) noexcept {
        if (!known_ || round_trip_ns <= round_trip_ns_ || ++age_ > kMostBeats) {
            known_ = true;
            age_ = 0;
            round_trip_ns_ = round_trip_ns;
            distance_ns_ = peer_ns + round_trip_ns / 2 - now_ns;
        }
    }

    /// A time of the peer's clock on this rank's one, at most `now_ns`; none before the first measurement.
    [[nodiscard]] std::optional<std::uint64_t> own_time(std::uint64_t peer_ns, std::uint64_t now_ns) const noexcept {
        if (!known_) {
            return std::nullopt;
        }
        const std::uint64_t own_ns = peer_ns - distance_ns_;  // modulo 2^64, as the distance
        return std::min(own_ns, now_ns);
    }

  private:
    static constexpr std::uint32_t kMostBeats = 64;  // clocks drift, so an estimate is not kept for longer

    bool known_ = false;
    std::uint32_t age_ = 0;
    std::uint64_t round_trip_ns_ = 0;
    std::uint64_t distance_ns_ = 0;
};

}  // namespace megatronapp::transport::ucx
