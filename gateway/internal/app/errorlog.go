package app

import (
	stdlog "log"
	"strings"

	"github.com/go-logr/logr"
)

// newErrorLog turns what net/http says, mostly of failed handshakes, into log records. They are detail: anyone who can
// reach the port can cause them.
func newErrorLog(log logr.Logger) *stdlog.Logger {
	return stdlog.New(lineWriter{log}, "", 0)
}

type lineWriter struct{ log logr.Logger }

// Write logs p as one record.
func (w lineWriter) Write(p []byte) (int, error) {
	w.log.V(2).Info("http server", "line", strings.TrimSpace(string(p)))
	return len(p), nil
}
