package auth

import (
	"context"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/utils/clock"
)

// Bearer authenticates bearer tokens: API keys by Keys, all others by Tokens. It bounds how many invalid ones the API server reviews
// for one host.
type Bearer struct {
	tokens, keys credentials
	strangers    *strangers
}

// credentials is one kind of bearer token.
type credentials interface {
	Authenticate(ctx context.Context, token string) (Caller, error)
	// known reports whether the token is remembered, so that Authenticate need not ask.
	known(token string) bool
}

// NewBearer returns an authenticator that has not asked yet.
func NewBearer(tokens *Tokens, keys *Keys, c clock.PassiveClock) *Bearer {
	return &Bearer{tokens: tokens, keys: keys, strangers: newStrangers(c)}
}

// Authenticate returns whose token it is. The errors are those of Tokens, and CALLER_LIMIT_EXCEEDED for a token that is not remembered
// and comes from a host that has presented too many invalid ones (WithAddress).
func (b *Bearer) Authenticate(ctx context.Context, token string) (Caller, error) {
	kind := b.tokens
	if strings.HasPrefix(token, keyPrefix) {
		kind = b.keys
	}
	if !kind.known(token) {
		if err := b.strangers.admit(ctx); err != nil {
			return Caller{}, err
		}
	}
	c, err := kind.Authenticate(ctx, token)
	if errdefs.IsUnauthorized(err) {
		b.strangers.failed(ctx)
	}
	return c, err
}
