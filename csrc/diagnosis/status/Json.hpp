// Writes JSON.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchcomms_pg::status {

// Builds one JSON text. Each call that opens an object or list also closes it.
class Json {
 public:
  // Writes an object, whose fields `body` writes.
  template <class Body>
  void object(Body&& body) {
    comma();
    within('{', '}', body);
  }
  // Writes an object for each element of the range: `body` writes the fields of its element.
  template <class Range, class Body>
  void objects(Range&& range, Body&& body) {
    for (auto&& each : range) {
      object([&] { body(each); });
    }
  }

  // Write a field of an object.
  template <class T>
  void field(const char* name, const T& value) {
    key(name);
    write(value);
  }
  // Writes a field whose value is JSON already.
  void fieldOfJson(const char* name, const std::string& json) {
    key(name);
    text_ += json;
  }
  template <class Body>
  void objectField(const char* name, Body&& body) {
    key(name);
    within('{', '}', body);
  }
  // `body` writes the objects of the list.
  template <class Body>
  void listField(const char* name, Body&& body) {
    key(name);
    within('[', ']', body);
  }
  template <class Range, class Body>
  void listField(const char* name, Range&& range, Body&& body) {
    listField(name, [&] { objects(range, body); });
  }

  std::string take() { return std::move(text_); }

 private:
  template <class Body>
  void within(char open, char close, Body&& body) {
    text_ += open;
    first_ = true;
    body();
    first_ = false;
    text_ += close;
  }
  void comma() {
    if (!first_) text_ += ',';
    first_ = false;
  }
  void key(const char* name) {
    comma();
    write(std::string(name));
    text_ += ':';
  }

  void write(bool value) { text_ += value ? "true" : "false"; }
  void write(std::nullptr_t) { text_ += "null"; }
  void write(const char* value) { write(std::string(value)); }
  void write(double value) {
    char digits[64];  // std::to_chars ignores the locale, which may have a decimal comma
    // Rounds to six decimals. Writes 0 if the number is not finite, or too large.
    const auto number = std::isfinite(value) && std::abs(value) < 1e9 ? value : 0;
    const auto rounded = std::round(number * 1e6) / 1e6;
    const auto end =
        std::to_chars(digits, digits + sizeof digits, rounded, std::chars_format::fixed);
    text_.append(digits, end.ptr);
  }
  template <class T>
    requires std::is_integral_v<T>
  void write(T value) {
    text_ += std::to_string(value);
  }
  template <class T>
  void write(const std::optional<T>& value) {
    value ? write(*value) : write(nullptr);
  }
  template <class T>
  void write(const std::vector<T>& values) {
    within('[', ']', [&] {
      for (const auto& each : values) {
        comma();
        write(each);
      }
    });
  }
  // Does not check for UTF-8: a reader has to replace invalid bytes.
  void write(const std::string& value) {
    text_ += '"';
    for (const char letter : value) {
      if (letter == '"' || letter == '\\') {
        text_ += '\\';
        text_ += letter;
      } else if (static_cast<unsigned char>(letter) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", letter);
        text_ += escaped;
      } else {
        text_ += letter;
      }
    }
    text_ += '"';
  }

  std::string text_;
  bool first_ = true;
};

}  // namespace torchcomms_pg::status
