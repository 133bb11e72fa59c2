// The part of nlohmann::json that torch's FlightRecorderDetail.hpp uses: objects that are filled in
// and written out.
//
// torch is built with the real library and does not ship it. This file costs less than a build
// dependency that every user would have to install.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace nlohmann {

class json {
 public:
  json() = default;
  template <class T>
    requires(!std::same_as<T, json>)
  json(const T& value) : text_() {  // NOLINT: implicit, as in the real library
    write(text_, value);
  }

  // Returns a member of this value, which becomes an object.
  json& operator[](const std::string& name) {
    text_.clear();
    return members_[name];
  }

  std::string dump() const {
    std::string out;
    write(out, *this);
    return out;
  }

 private:
  static void write(std::string& out, const json& value) {
    if (value.members_.empty()) {
      out += value.text_;
    } else {
      writeObject(out, value.members_);
    }
  }
  static void write(std::string& out, bool value) { out += value ? "true" : "false"; }
  template <std::integral T>
  static void write(std::string& out, T value) {
    out += std::to_string(value);
  }
  static void write(std::string& out, float value) {
    if (!std::isfinite(value)) {
      out += "null";
      return;
    }
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    out.append(digits, end);
  }
  static void write(std::string& out, const std::string& value) {
    out += '"';
    for (size_t i = 0; i < value.size();) {
      const auto byte = static_cast<unsigned char>(value[i]);
      if (const size_t length = utf8Length(std::string_view(value).substr(i)); length == 0) {
        out += "\\ufffd";  // not UTF-8: a thread may have any name
        i += 1;
      } else if (byte < 0x20) {
        static constexpr char kHex[] = "0123456789abcdef";
        out += {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]};
        i += 1;
      } else {
        if (byte == '"' || byte == '\\') {
          out += '\\';
        }
        out.append(value, i, length);
        i += length;
      }
    }
    out += '"';
  }
  static void write(std::string& out, const std::tuple<std::string, std::string>& value) {
    out += '[';
    write(out, std::get<0>(value));
    out += ',';
    write(out, std::get<1>(value));
    out += ']';
  }
  template <class T>
  static void write(std::string& out, const std::list<T>& values) {
    writeArray(out, values);
  }
  template <class T>
  static void write(std::string& out, const std::vector<T>& values) {
    writeArray(out, values);
  }
  template <class T>
  static void write(std::string& out, const std::map<std::string, T>& members) {
    writeObject(out, members);
  }
  template <class T>
  static void write(std::string& out, const std::unordered_map<std::string, T>& members) {
    writeObject(out, members);
  }

  template <class Values>
  static void writeArray(std::string& out, const Values& values) {
    char before = '[';
    for (const auto& value : values) {
      out += before;
      write(out, value);
      before = ',';
    }
    out += before == '[' ? "[]" : "]";
  }
  template <class Members>
  static void writeObject(std::string& out, const Members& members) {
    char before = '{';
    for (const auto& [name, value] : members) {
      out += before;
      write(out, name);
      out += ':';
      write(out, value);
      before = ',';
    }
    out += before == '{' ? "{}" : "}";
  }

  // Returns the number of bytes of the UTF-8 character with which `text` begins, or 0 if the first
  // bytes are no character.
  static size_t utf8Length(std::string_view text) {
    const auto first = static_cast<unsigned char>(text[0]);
    const size_t length = first < 0x80                    ? 1
                          : first >= 0xc2 && first < 0xe0 ? 2
                          : first >= 0xe0 && first < 0xf0 ? 3
                          : first >= 0xf0 && first < 0xf5 ? 4
                                                          : 0;
    if (text.size() < length) {
      return 0;
    }
    for (size_t i = 1; i < length; ++i) {
      if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) {
        return 0;
      }
    }
    return length;
  }

  std::string text_ = "null";
  std::map<std::string, json> members_;
};

}  // namespace nlohmann
