// The module torchcomms_pg._judge: the rule of blame for who reads the status of a job or the dumps
// of flight recorders. Needs no torch, and one build serves every Python from 3.11 on.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <exception>
#include <optional>
#include <string>

#include "judge/JobReport.hpp"
#include "judge/RecordedWaits.hpp"

namespace torchcomms_pg {

namespace {

// Calls a function that returns JSON for a text, or nullopt if the text is damaged.
template <std::optional<std::string> (*function)(const std::string&)>
PyObject* call(PyObject* /*module*/, PyObject* given) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(given, &data, &size) != 0) {
    return nullptr;
  }
  try {
    if (const auto json = function({data, static_cast<size_t>(size)})) {
      return PyUnicode_DecodeUTF8(json->data(), static_cast<Py_ssize_t>(json->size()), "replace");
    }
    PyErr_SetString(PyExc_ValueError, "the text is damaged, or of another version");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

std::optional<std::string> report(const std::string& answers) {
  const auto known = status::decodeAnswers(answers);
  return known ? std::optional(status::report(*known)) : std::nullopt;
}

PyMethodDef functions[] = {
    {"report", call<report>, METH_O, "report(answers, /)\n--\n\nReturns a job's status as JSON."},
    {"blame", call<blameRecorded>, METH_O,
     "blame(records, /)\n--\n\nReturns as JSON who holds up each wait of dumps' records."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module{
    PyModuleDef_HEAD_INIT, "_judge", nullptr, 0, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace torchcomms_pg

PyMODINIT_FUNC PyInit__judge() {
  return PyModule_Create(&torchcomms_pg::module);
}
