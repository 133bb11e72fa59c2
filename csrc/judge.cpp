// The module torchcomms_pg._judge, which makes a job's status of what its processes have reported.
// Needs no torch, and one build serves every Python from 3.11 on.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <exception>
#include <string>

#include "judge/JobReport.hpp"

namespace torchcomms_pg::status {

namespace {

PyObject* reportOf(PyObject* /*module*/, PyObject* answers) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(answers, &data, &size) != 0) {
    return nullptr;
  }
  try {
    if (const auto known = decodeAnswers({data, static_cast<size_t>(size)})) {
      const auto json = report(*known);
      return PyUnicode_DecodeUTF8(json.data(), static_cast<Py_ssize_t>(json.size()), "replace");
    }
    PyErr_SetString(PyExc_ValueError, "the answers are damaged, or of another version");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef functions[] = {
    {"report", reportOf, METH_O, "report(answers, /)\n--\n\nReturns a job's status as JSON."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module{
    PyModuleDef_HEAD_INIT, "_judge", nullptr, 0, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace torchcomms_pg::status

PyMODINIT_FUNC PyInit__judge() {
  return PyModule_Create(&torchcomms_pg::status::module);
}
