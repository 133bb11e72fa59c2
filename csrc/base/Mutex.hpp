// A mutex, its locks, and clang's annotations, which let the compiler check who holds which mutex.
#pragma once

#include <mutex>

// g++ has no such analysis. https://clang.llvm.org/docs/ThreadSafetyAnalysis.html
#ifdef __clang__
#define TORCHCOMMS_PG_CHECKED(...) __attribute__((__VA_ARGS__))
#else
#define TORCHCOMMS_PG_CHECKED(...)
#endif

// Of types: a mutex, and an object that holds one while it lives.
#define CAPABILITY(kind) TORCHCOMMS_PG_CHECKED(capability(kind))
#define SCOPED_CAPABILITY TORCHCOMMS_PG_CHECKED(scoped_lockable)

// Of data: is read and written with the mutex held.
#define GUARDED_BY(mutex) TORCHCOMMS_PG_CHECKED(guarded_by(mutex))

// Of a mutex: a thread that takes both takes this one first.
#define ACQUIRED_BEFORE(...) TORCHCOMMS_PG_CHECKED(acquired_before(__VA_ARGS__))

// Of functions, and of lambdas, which inherit nothing from where they stand: is called with the
// mutex held; without it, since the function takes it; takes it; releases it.
#define REQUIRES(...) TORCHCOMMS_PG_CHECKED(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) TORCHCOMMS_PG_CHECKED(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) TORCHCOMMS_PG_CHECKED(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) TORCHCOMMS_PG_CHECKED(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) TORCHCOMMS_PG_CHECKED(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(...) TORCHCOMMS_PG_CHECKED(assert_capability(__VA_ARGS__))

// Of a function that is right for a reason that the analysis does not see; a comment gives it.
#define NO_THREAD_SAFETY_ANALYSIS TORCHCOMMS_PG_CHECKED(no_thread_safety_analysis)

namespace torchcomms_pg {

// std::mutex. Take it with LockGuard or UniqueLock.
class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class UniqueLock;
  std::mutex mutex_;
};

// std::lock_guard.
class [[nodiscard]] SCOPED_CAPABILITY LockGuard {
 public:
  explicit LockGuard(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~LockGuard() RELEASE() { mutex_.unlock(); }
  LockGuard(const LockGuard&) = delete;
  LockGuard& operator=(const LockGuard&) = delete;

 private:
  Mutex& mutex_;
};

// std::unique_lock, with which a std::condition_variable waits.
class [[nodiscard]] SCOPED_CAPABILITY UniqueLock : public std::unique_lock<std::mutex> {
 public:
  explicit UniqueLock(Mutex& mutex) ACQUIRE(mutex) : std::unique_lock<std::mutex>(mutex.mutex_) {}
  UniqueLock(Mutex& mutex, std::adopt_lock_t adopt) REQUIRES(mutex)
      : std::unique_lock<std::mutex>(mutex.mutex_, adopt) {}
  ~UniqueLock() RELEASE() {}
  UniqueLock(const UniqueLock&) = delete;
  UniqueLock& operator=(const UniqueLock&) = delete;

  void lock() ACQUIRE() { std::unique_lock<std::mutex>::lock(); }
  void unlock() RELEASE() { std::unique_lock<std::mutex>::unlock(); }
};

// Releases a mutex while it lives, also in a function whose caller holds the lock.
class [[nodiscard]] SCOPED_CAPABILITY Unlocked {
 public:
  explicit Unlocked(Mutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() RELEASE() { mutex_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace torchcomms_pg
