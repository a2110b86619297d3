// This file is empty: with one of assembly in a package, the compiler accepts the functions without a body in child.go.
