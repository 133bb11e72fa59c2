// A locale as a program may have made its own.
#pragma once

#include <locale>
#include <string>

namespace test {

// While it lives, numbers have their digits grouped by `separator`, as after a call of
// std::locale::global().
class GroupedDigits {
 public:
  explicit GroupedDigits(char separator)
      : before_(std::locale::global(std::locale(std::locale(), new Groups(separator)))) {}
  ~GroupedDigits() { std::locale::global(before_); }

 private:
  class Groups : public std::numpunct<char> {
   public:
    explicit Groups(char separator) : separator_(separator) {}

   private:
    char do_thousands_sep() const override { return separator_; }
    std::string do_grouping() const override { return "\3"; }
    const char separator_;
  };
  const std::locale before_;
};

}  // namespace test
