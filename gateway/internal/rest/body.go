package rest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// bodyTimeout is how long a caller may take to send its body.
	bodyTimeout = 30 * time.Second
	// writeSlack is how long the write of an answer may take after the deadline of the request.
	writeSlack = 30 * time.Second
)

// withBody reads the whole body first, so that its size and duration are bounded in one place and a slow caller holds no
// call to an upstream. In HTTP/1.1 the requests of a connection share deadlines, so each request sets its own. Connections
// without deadlines (in tests) have none.
func (a *api) withBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		now := a.config.Clock.Now()
		_ = control.SetReadDeadline(now.Add(bodyTimeout))
		_ = control.SetWriteDeadline(now.Add(bodyTimeout + a.config.RequestTimeout + writeSlack))
		if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
			a.writeError(r.Context(), w, fault.Field("Content-Encoding", "%q is not supported; send the body without an encoding", encoding),
				http.StatusUnsupportedMediaType)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, a.config.MaxBodyBytes))
		if err != nil {
			a.refuseBody(w, r, err)
			return
		}
		_ = control.SetReadDeadline(time.Time{}) // else net/http reports its expiry as the end of the connection
		if err := oneDocument(body); err != nil {
			a.writeError(r.Context(), w, err, 0)
			return
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		next.ServeHTTP(w, r)
	})
}

// oneDocument refuses a body that is not exactly one JSON document. grpc-gateway ignores what follows the first one.
func oneDocument(body []byte) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	var document json.RawMessage
	if err := json.Unmarshal(body, &document); err != nil {
		return fault.Field("body", "must be one JSON document: %v", err)
	}
	return nil
}

func (a *api) refuseBody(w http.ResponseWriter, r *http.Request, err error) {
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		a.writeError(r.Context(), w, fault.New(errdefs.ErrInvalidArgument, fault.RequestTooLarge,
			"body: must have at most %d bytes", large.Limit).With(fault.FieldKey, "body"),
			http.StatusRequestEntityTooLarge)
		return
	}
	w.Header().Set("Connection", "close")
	a.writeError(r.Context(), w, fault.Field("body", "did not arrive within %s", bodyTimeout), http.StatusRequestTimeout)
}
