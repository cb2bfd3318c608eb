#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace megatronapp {

/// While it exists, threads that this one starts take no signals: those are for the threads of the application.
class QuietThreads {
  public:
    QuietThreads() {
        sigset_t all{};
        sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    QuietThreads(const QuietThreads&) = delete;
    QuietThreads& operator=(const QuietThreads&) = delete;
    QuietThreads(QuietThreads&&) = delete;
    QuietThreads& operator=(QuietThreads&&) = delete;
    ~QuietThreads() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_{};
};

/// Starts a thread that takes no signals.
template <typename Function>
std::thread quiet_thread(Function function) {
    const QuietThreads quiet;
    return std::thread(std::move(function));
}

}  // namespace megatronapp
