#include "megatronapp/transport/host/streamed_copy.hpp"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace megatronapp::transport {

#if defined(__SSE2__)

namespace {

constexpr std::uint64_t kVector = sizeof(__m128i);
constexpr std::uint64_t kLine = 4 * kVector;

/// Copies whole cache lines with stores that combine in a buffer of the core and go to memory from there. `target` is
/// aligned to a vector.
void stream_lines(std::byte* target, const std::byte* source, std::uint64_t bytes) noexcept {
    for (std::uint64_t i = 0; i < bytes; i += kLine) {
        const auto* from = reinterpret_cast<const __m128i*>(source + i);
        auto* to = reinterpret_cast<__m128i*>(target + i);
        const __m128i first = _mm_loadu_si128(from);
        const __m128i second = _mm_loadu_si128(from + 1);
        const __m128i third = _mm_loadu_si128(from + 2);
        const __m128i fourth = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, first);
        _mm_stream_si128(to + 1, second);
        _mm_stream_si128(to + 2, third);
        _mm_stream_si128(to + 3, fourth);
    }
    _mm_sfence();  // such stores are not ordered by the release with which a message is announced
}

}  // namespace

void streamed_copy(std::byte* target, const std::byte* source, std::uint64_t bytes,
                   std::uint64_t message_bytes) noexcept {
    std::uint64_t streamed = 0;
    if (message_bytes >= kStreamedBytes && reinterpret_cast<std::uintptr_t>(target) % kVector == 0) {
        streamed = bytes / kLine * kLine;
        stream_lines(target, source, streamed);
    }
    if (streamed < bytes) {
        std::memcpy(target + streamed, source + streamed, bytes - streamed);
    }
}

#else

void streamed_copy(std::byte* target, const std::byte* source, std::uint64_t bytes,
                   std::uint64_t /*message_bytes*/) noexcept {
    if (bytes != 0) {
        std::memcpy(target, source, bytes);
    }
}

#endif

}  // namespace megatronapp::transport
