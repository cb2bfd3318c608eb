#include "megatronapp/fork_count.hpp"

#include <pthread.h>

#include <atomic>

namespace megatronapp {
namespace {

std::atomic<std::uint64_t> forks{0};

bool count_forks() noexcept {
    return pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); }) == 0;
}

}  // namespace

std::uint64_t fork_count() noexcept {
    static const bool counted = count_forks();
    static_cast<void>(counted);
    return forks.load(std::memory_order_relaxed);
}

}  // namespace megatronapp
