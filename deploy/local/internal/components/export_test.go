package components

// The pure parts, for tests.
var Reason = reason
