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
	// bodyTimeout is how long a caller may take to send its body, however slowly.
	bodyTimeout = 30 * time.Second
	// writeSlack is how long, after its deadline, a request's answer may take to be written.
	writeSlack = 30 * time.Second
)

// withBody reads the whole body before anything else happens, so that its size and pace are bounded in one place and a
// slow caller holds no call to the allocator. HTTP/1.1 shares deadlines among a connection's requests, so each request
// sets its own; those of connections that know none (tests without a network) are left out.
func (a *api) withBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		now := a.config.Clock.Now()
		_ = control.SetReadDeadline(now.Add(bodyTimeout))
		_ = control.SetWriteDeadline(now.Add(bodyTimeout + a.config.RequestTimeout + writeSlack))
		if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
			a.writeError(r.Context(), w, fault.Field("Content-Encoding", "%q is not understood; send the body as it is", encoding),
				http.StatusUnsupportedMediaType)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, a.config.MaxBodyBytes))
		if err != nil {
			a.refuseBody(w, r, err)
			return
		}
		_ = control.SetReadDeadline(time.Time{}) // else net/http takes its passing for the caller's leaving
		if err := oneDocument(body); err != nil {
			a.writeError(r.Context(), w, err, 0)
			return
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		next.ServeHTTP(w, r)
	})
}

// oneDocument refuses what is not exactly one JSON document; grpc-gateway would overlook what follows the first.
func oneDocument(body []byte) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	var document json.RawMessage
	if err := json.Unmarshal(body, &document); err != nil {
		return fault.Field("body", "it is not one JSON document: %v", err)
	}
	return nil
}

func (a *api) refuseBody(w http.ResponseWriter, r *http.Request, err error) {
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		a.writeError(r.Context(), w, fault.New(errdefs.ErrInvalidArgument, fault.RequestTooLarge,
			"body: it is larger than the %d bytes that are taken", large.Limit).With(fault.FieldKey, "body"),
			http.StatusRequestEntityTooLarge)
		return
	}
	w.Header().Set("Connection", "close")
	a.writeError(r.Context(), w, fault.Field("body", "it did not arrive whole within %s", bodyTimeout), http.StatusRequestTimeout)
}
