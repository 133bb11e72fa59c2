// A test framework in a page: TEST(name) { CHECK(...); CHECK_EQUAL(a, b); }.
// Every test runs in a process of its own with a time limit.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "base/Races.hpp"

namespace test {

// Under a sanitizer, and where a processor is emulated, all takes ten times as long.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(EMULATED)
inline constexpr bool kSlow = true;
#else
inline constexpr bool kSlow = false;
#endif

struct Test {
  const char* name;
  std::function<void()> body;
  int seconds;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, int seconds, void (*body)()) {
    tests().push_back({name, body, seconds});
  }
};

[[noreturn]] inline void stop(const char* file, int line, const std::string& text) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

template <class A, class B>
void checkEqual(const A& got, const B& wanted, const char* what, const char* file, int line) {
  if (got == wanted) return;
  std::ostringstream text;
  text << what << " is " << got << ", wanted " << wanted;
  stop(file, line, text.str());
}

inline void checkContains(
    const std::string& text, const std::string& part, const char* file, int line) {
  if (text.find(part) != std::string::npos) return;
  stop(file, line, "\"" + text + "\" does not contain \"" + part + "\"");
}

}  // namespace test

#define TEST(name) TEST_WITHIN(name, 30)
#define TEST_WITHIN(name, seconds)                                            \
  static void name();                                                         \
  static const ::test::Registration name##Registration(#name, seconds, name); \
  static void name()

#define CHECK(condition) \
  ((condition) ? (void)0 : ::test::stop(__FILE__, __LINE__, "failed: " #condition))
// The branch is reached that only this race reaches.
#define CHECK_PASSED(race) CHECK(torchcomms_pg::races::passed(torchcomms_pg::races::Race::race) > 0)
#define CHECK_EQUAL(got, wanted) ::test::checkEqual(got, wanted, #got, __FILE__, __LINE__)
#define CHECK_CONTAINS(text, part) ::test::checkContains(text, part, __FILE__, __LINE__)
