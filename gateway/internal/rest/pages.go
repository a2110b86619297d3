package rest

import (
	"net/http"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// page serves a path outside the API, for GET and HEAD.
func (a *api) page(route string, serve http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		exchangeOf(r.Context()).route = route
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			a.writeStatus(r.Context(), w, ownStatus(codes.Unimplemented, r.Method+" is not allowed on "+route), http.StatusMethodNotAllowed)
			return
		}
		serve(w, r)
	})
}

// healthz reports that the process is alive.
func (a *api) healthz(w http.ResponseWriter, _ *http.Request) { a.text(w, "ok\n") }

// readyz reports whether the allocator can be reached.
func (a *api) readyz(w http.ResponseWriter, r *http.Request) {
	select {
	case <-a.config.Draining:
		a.writeError(r.Context(), w, errDraining(), 0)
		return
	default:
	}
	if err := a.config.Ready(r.Context()); err != nil {
		a.config.Log.V(2).Info("not ready", obs.KeyError, err.Error())
		a.writeError(r.Context(), w, fault.New(errdefs.ErrUnavailable, "UNSPECIFIED", "the allocator cannot be reached or is not ready"), 0)
		return
	}
	a.text(w, "ok\n")
}

func (a *api) text(w http.ResponseWriter, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if _, err := w.Write([]byte(s)); err != nil {
		a.config.Log.V(2).Info("writing response", obs.KeyError, err.Error())
	}
}

// document serves the OpenAPI document in one of its forms.
func (a *api) document(contentType string, document []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		if _, err := w.Write(document); err != nil {
			a.config.Log.V(2).Info("writing response", obs.KeyError, err.Error())
		}
	}
}

// crossOrigin refuses a request that a page of another site makes: the browser adds its user's certificate to it.
func (a *api) crossOrigin(w http.ResponseWriter, r *http.Request) {
	a.writeError(r.Context(), w, fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied,
		"cross-origin requests are not allowed"), 0)
}

func errDraining() error {
	return fault.New(errdefs.ErrUnavailable, "UNSPECIFIED", "the gateway is stopping; connect again")
}
