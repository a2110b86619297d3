package app

// Serve is Run against an API server that is given.
var Serve = run
