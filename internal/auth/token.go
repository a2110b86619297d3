package auth

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Audience is the audience that tokens of ServiceAccounts must have: a token that a Pod uses at the API server is not accepted,
// so that no component of ours could use it there.
const Audience = "fast-sandbox.io"

// maxToken bounds the length of a token; those of OIDC providers with many groups have some kilobytes.
const maxToken = 16 << 10

// TokenReviews creates TokenReviews. client-go's TokenReviewInterface implements it.
type TokenReviews interface {
	Create(ctx context.Context, review *authenticationv1.TokenReview, opts metav1.CreateOptions) (*authenticationv1.TokenReview, error)
}

// Tokens authenticates bearer tokens: those that the API server accepts.
type Tokens struct {
	reviews TokenReviews
	memory  *memory[Caller]
	hide    func(string) string
}

// NewTokens returns an authenticator that has not asked yet.
func NewTokens(r TokenReviews, t Timing, c clock.PassiveClock) *Tokens {
	return &Tokens{reviews: r, memory: newMemory[Caller](t, c), hide: keyedHash()}
}

// Authenticate returns whose token it is. The error is UNAUTHENTICATED, or API_UNAVAILABLE if the API server does not answer and
// nothing is remembered.
func (t *Tokens) Authenticate(ctx context.Context, token string) (Caller, error) {
	if token == "" || len(token) > maxToken {
		return Caller{}, unauthenticated("the bearer token is empty or too long")
	}
	got, err := t.memory.ask(ctx, t.hide(token), func(ctx context.Context) (answer[Caller], error) { return t.review(ctx, token) })
	switch {
	case err != nil && ctx.Err() != nil:
		return Caller{}, fault.FromContext(ctx, "reviewing the token", err)
	case err != nil:
		return Caller{}, undecided(err, "the API server cannot be asked whose token this is")
	case !got.allowed:
		return Caller{}, unauthenticated("the bearer token is not valid for audience " + Audience)
	}
	return got.value, nil
}

func (t *Tokens) known(token string) bool { return t.memory.knows(t.hide(token)) }

// review asks the API server. It accepts the tokens of an OIDC provider only for its own audience, so those are reviewed without
// one; a ServiceAccount's token that passes such a review is one for the API server, and is refused.
func (t *Tokens) review(ctx context.Context, token string) (answer[Caller], error) {
	for _, audiences := range [][]string{{Audience}, nil} {
		review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: audiences}}
		response, err := t.reviews.Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return answer[Caller]{}, err
		}
		if s := response.Status; s.Authenticated && (slices.Contains(s.Audiences, Audience) || audiences == nil && !isServiceAccount(s.User.Username)) {
			return answer[Caller]{value: fromUserInfo(s.User, Token), allowed: true, until: expiry(token)}, nil
		}
	}
	return answer[Caller]{}, nil
}

func isServiceAccount(user string) bool { return strings.HasPrefix(user, "system:serviceaccount:") }

// expiry returns when a JWT ends; zero for another token. The API server has verified it.
func expiry(token string) time.Time {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}
	}
	raw, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}
	}
	var claims struct {
		Expiry float64 `json:"exp"`
	}
	if json.Unmarshal(raw, &claims) != nil || claims.Expiry <= 0 {
		return time.Time{}
	}
	return time.Unix(int64(claims.Expiry), 0)
}

func unauthenticated(message string) error {
	return fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "%s", message)
}
