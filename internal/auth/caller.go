// Package auth says who calls (authentication) and what the caller may do (authorization). Users are those of Kubernetes: the API
// server reviews their bearer tokens and their access, and this package remembers its answers for seconds. Components are not
// users: internal/rpc knows them by the role in their certificate. The package decides nothing about requests that no user made,
// and keeps no rights of its own.
//
// All methods may be called concurrently.
package auth

import (
	"context"
	"crypto/x509"
	"maps"
	"slices"
	"strconv"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
)

// Method is how a caller proved who it is.
type Method string

// The methods.
const (
	// Token is a bearer token that the API server accepts: of a ServiceAccount, or of an OIDC provider.
	Token Method = "token"
	// Certificate is a client certificate: CN is the user, each O a group.
	Certificate Method = "certificate"
	// APIKey is a key of ours that stands for a ServiceAccount.
	APIKey Method = "api-key"
	// ByTicket is a ticket that an allocator signed.
	ByTicket Method = "ticket"
)

// Caller is an authenticated user.
type Caller struct {
	// User is the name of the user, UID its unique id, which may be empty.
	User, UID string
	// Groups of the user.
	Groups []string
	// Extra is what the authenticator adds, for instance the Pod of a ServiceAccount's token.
	Extra map[string][]string
	// Method is how the caller proved who it is.
	Method Method
	// Address is where the call came from, as the server saw it that authenticated the caller.
	Address string
	// Ticket is what the caller may do, and nothing else, if the method is ByTicket.
	Ticket *Ticket `json:"-"`
}

// allAuthenticated is the group of every user that has proved who it is.
const allAuthenticated = "system:authenticated"

// fromUserInfo returns the caller that the API server has named.
func fromUserInfo(u authenticationv1.UserInfo, m Method) Caller {
	c := Caller{User: u.Username, UID: u.UID, Groups: slices.Clone(u.Groups), Method: m}
	for key, values := range u.Extra {
		if c.Extra == nil {
			c.Extra = map[string][]string{}
		}
		c.Extra[key] = slices.Clone(values)
	}
	return c.normalized()
}

// FromCertificate returns the caller that a verified client certificate names; false if it names no user. A certificate with a
// URI is that of a component, which is never a user.
func FromCertificate(cert *x509.Certificate) (Caller, bool) {
	if cert == nil || len(cert.URIs) > 0 || cert.Subject.CommonName == "" {
		return Caller{}, false
	}
	return Caller{User: cert.Subject.CommonName, Groups: slices.Clone(cert.Subject.Organization), Method: Certificate}.normalized(), true
}

// normalized sorts the groups and adds that of all authenticated users.
func (c Caller) normalized() Caller {
	if !slices.Contains(c.Groups, allAuthenticated) {
		c.Groups = append(c.Groups, allAuthenticated)
	}
	slices.Sort(c.Groups)
	c.Groups = slices.Compact(c.Groups)
	return c
}

// key identifies the caller among all callers: two with the same key have the same rights.
func (c Caller) key() string {
	var b strings.Builder
	field := func(s string) { writeField(&b, s) }
	field(c.User)
	field(c.UID)
	field(strconv.Itoa(len(c.Groups)))
	for _, g := range c.Groups {
		field(g)
	}
	for _, k := range slices.Sorted(maps.Keys(c.Extra)) {
		field(k)
		field(strconv.Itoa(len(c.Extra[k])))
		for _, v := range c.Extra[k] {
			field(v)
		}
	}
	return b.String()
}

// writeField adds a text to a key so that no text of another field can continue it.
func writeField(b *strings.Builder, s string) {
	b.WriteString(strconv.Itoa(len(s)))
	b.WriteByte(':')
	b.WriteString(s)
}

type contextKey struct{}

// WithCaller returns a context that carries the caller.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, contextKey{}, c)
}

// CallerOf returns the caller of a call; false if a component made it on its own behalf.
func CallerOf(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(contextKey{}).(Caller)
	return c, ok
}
