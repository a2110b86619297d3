package rest

import (
	"net/http"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// page serves a path that is no part of the API, for GET and HEAD.
func (a *api) page(route string, serve http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		exchangeOf(r.Context()).route = route
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			a.writeStatus(r.Context(), w, ownStatus(codes.Unimplemented, r.Method+" is not possible on "+route), http.StatusMethodNotAllowed)
			return
		}
		serve(w, r)
	})
}

// healthz tells that the process lives.
func (a *api) healthz(w http.ResponseWriter, _ *http.Request) { a.text(w, "ok\n") }

// readyz tells whether the allocator can be reached.
func (a *api) readyz(w http.ResponseWriter, r *http.Request) {
	select {
	case <-a.config.Draining:
		a.writeError(r.Context(), w, errDraining(), 0)
		return
	default:
	}
	if err := a.config.Ready(r.Context()); err != nil {
		a.config.Log.V(2).Info("not ready", "err", err.Error())
		a.writeError(r.Context(), w, fault.New(errdefs.ErrUnavailable, "UNSPECIFIED", "the allocator cannot be reached or is not ready"), 0)
		return
	}
	a.text(w, "ok\n")
}

func (a *api) text(w http.ResponseWriter, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if _, err := w.Write([]byte(s)); err != nil {
		a.config.Log.V(2).Info("writing answer", "err", err.Error())
	}
}

// openapi serves the document as it was generated.
func (a *api) openapi(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if _, err := w.Write(a.config.Document); err != nil {
		a.config.Log.V(2).Info("writing answer", "err", err.Error())
	}
}

// authorized lets only the configured roles through.
func (a *api) authorized(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if role := rpc.RoleOf(r.TLS); a.config.Roles != nil && !slices.Contains(a.config.Roles, role) {
			a.writeError(r.Context(), w, fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied,
				"a certificate of role %q may not use the API", role).With("role", string(role)), 0)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// crossOrigin refuses what a browser sends in another site's name: the browser would show its user's certificate.
func (a *api) crossOrigin(w http.ResponseWriter, r *http.Request) {
	a.writeError(r.Context(), w, fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied,
		"requests of other sites are refused"), 0)
}

func errDraining() error {
	return fault.New(errdefs.ErrUnavailable, "UNSPECIFIED", "the gateway is stopping; connect again")
}
