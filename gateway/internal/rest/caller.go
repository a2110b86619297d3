package rest

import (
	"context"
	"crypto/x509"
	"net/http"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Tokens authenticates bearer tokens. *auth.Bearer implements it.
type Tokens interface {
	Authenticate(ctx context.Context, token string) (auth.Caller, error)
}

// authenticated refuses requests that do not prove who makes them. The server that is called decides what the caller may do. The
// token goes no further: grpc-gateway would forward it, and no upstream takes it.
func (a *api) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if a.config.Tokens != nil {
			c, err := a.caller(r)
			if err != nil {
				a.refuseCaller(w, r, err)
				return
			}
			c.Address = r.RemoteAddr
			r = r.WithContext(auth.WithCaller(r.Context(), c))
		}
		r.Header.Del("Authorization")
		next.ServeHTTP(w, r)
	})
}

// refuseCaller answers a request that does not prove who makes it.
func (a *api) refuseCaller(w http.ResponseWriter, r *http.Request, err error) {
	a.recordRefusal(r, err)
	if errdefs.IsUnauthorized(err) {
		w.Header().Set("WWW-Authenticate", `Bearer realm="`+rpc.Domain+`"`)
		if rpc.StrangeRequest(r.Context()) {
			w.Header().Set("Connection", "close") // HTTP/2 ends the connection for it, too
		}
	}
	a.writeError(r.Context(), w, err, 0)
}

// recordRefusal records a request that no server authorizes, because it does not say who makes it.
func (a *api) recordRefusal(r *http.Request, err error) {
	refusal := audit.Record{
		Caller: auth.Caller{Address: r.RemoteAddr}, Method: r.Method + " " + r.URL.Path, RequestID: exchangeOf(r.Context()).requestID,
	}
	refusal.Decision, refusal.Reason = audit.Of(err, "")
	a.audit.WriteBounded(r.Context(), refusal)
}

// caller returns who makes a request: a token says it before a certificate.
func (a *api) caller(r *http.Request) (auth.Caller, error) {
	if values := r.Header.Values("Authorization"); len(values) > 0 {
		scheme, token, ok := strings.Cut(values[0], " ")
		if !ok || len(values) > 1 || !strings.EqualFold(scheme, "bearer") {
			return auth.Caller{}, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "Authorization must be one bearer token")
		}
		return a.config.Tokens.Authenticate(auth.WithAddress(r.Context(), r.RemoteAddr), strings.TrimSpace(token))
	}
	var cert *x509.Certificate
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		cert = r.TLS.PeerCertificates[0]
	}
	c, ok := auth.FromCertificate(cert)
	if !ok {
		return c, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "a bearer token or the client certificate of a user is required")
	}
	return c, nil
}
