// Package archtest enforces the rules of the house that a test can check: which package imports which (imports_test.go),
// the size of files, functions and types and what sources must not contain (sources_test.go), and that
// docs/architecture.md names every package (docs_test.go). It has no code of its own.
package archtest
