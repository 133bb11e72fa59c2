// Writes and reads a record's fields as text, one after another. A string is quoted. A list's
// length precedes its elements. An optional is written as 0, or as 1 and its value.
//
// A record names its fields in its function `static void fields(auto& self, auto& visit)`.
#pragma once

#include <iomanip>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/TextStreams.hpp"

namespace torchcomms_pg::fields {

// Limit of a list's length, in case a text is damaged.
inline constexpr size_t kMost = 1 << 20;

class Writer {
 public:
  explicit Writer(std::ostream& out) : out_(out) {}

  template <class... Fields>
  void operator()(const Fields&... fields) {
    (write(fields), ...);
  }

 private:
  void write(const std::string& text) { out_ << std::quoted(text) << ' '; }
  template <class T>
  void write(const std::vector<T>& list) {
    write(list.size());
    for (const auto& each : list) write(each);
  }
  template <class T>
  void write(const std::optional<T>& value) {
    write(value.has_value());
    if (value) write(*value);
  }
  template <class T>
  void write(const T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      out_ << +value << ' ';
    } else if constexpr (std::is_enum_v<T>) {
      write(static_cast<int>(value));
    } else {
      T::fields(value, *this);
    }
  }

  std::ostream& out_;
};

class Reader {
 public:
  explicit Reader(std::istream& in) : in_(in) {}

  template <class... Fields>
  void operator()(Fields&... fields) {
    (read(fields), ...);
  }

  // Returns whether all fields have been read, and nothing else follows.
  bool ended() { return in_ && in_.get() == ' ' && in_.peek() == std::istream::traits_type::eof(); }

 private:
  void read(std::string& text) { in_ >> std::quoted(text); }
  template <class T>
  void read(std::vector<T>& list) {
    size_t size = 0;
    read(size);
    if (size > kMost) in_.setstate(std::ios::failbit);
    for (; in_ && size > 0; --size) read(list.emplace_back());
  }
  template <class T>
  void read(std::optional<T>& value) {
    bool there = false;
    read(there);
    if (there) read(value.emplace());
  }
  template <class T>
  void read(T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      in_ >> value;
    } else if constexpr (std::is_enum_v<T>) {
      int number = 0;
      read(number);
      value = static_cast<T>(number);
    } else {
      T::fields(value, *this);
    }
  }

  std::istream& in_;
};

template <class Record>
std::string write(const Record& record) {
  TextWriter out;
  Writer writer(out);
  Record::fields(record, writer);
  return out.str();
}

// Returns the record, or nullopt if `text` is damaged or has other fields.
template <class Record>
std::optional<Record> read(const std::string& text) {
  TextReader in(text);
  Reader reader(in);
  Record record;
  Record::fields(record, reader);
  return reader.ended() ? std::optional(std::move(record)) : std::nullopt;
}

}  // namespace torchcomms_pg::fields
