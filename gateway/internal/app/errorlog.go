package app

import (
	stdlog "log"
	"strings"

	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// newErrorLog returns a logger for net/http's messages, most of which are about failed handshakes. They are logged as detail:
// anyone who can reach the port can cause them.
func newErrorLog(log logr.Logger) *stdlog.Logger {
	return stdlog.New(lineWriter{log}, "", 0)
}

type lineWriter struct{ log logr.Logger }

// Write implements io.Writer: it logs p as one record.
func (w lineWriter) Write(p []byte) (int, error) {
	w.log.V(2).Info("http server message", obs.KeyLine, strings.TrimSpace(string(p)))
	return len(p), nil
}
