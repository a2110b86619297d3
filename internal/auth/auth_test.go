package auth_test

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errAway = errors.New("connection refused")

// apiServer reviews access and tokens: alice may do everything in namespace a.
type apiServer struct {
	mu     sync.Mutex
	away   bool
	slow   time.Duration
	rights map[string]bool // "user verb namespace"
	tokens map[string]authenticationv1.TokenReviewStatus
	asked  int
}

func (s *apiServer) set(change func(s *apiServer)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *apiServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// receive counts a question, and answers it after a while.
func (s *apiServer) receive(ctx context.Context) error {
	s.mu.Lock()
	s.asked++
	away, slow := s.away, s.slow
	s.mu.Unlock()
	if slow > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(slow):
		}
	}
	if away {
		return errAway
	}
	return nil
}

type accessReviews struct{ *apiServer }

func (s accessReviews) Create(ctx context.Context, r *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error) {
	if err := s.receive(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Status.Allowed = s.rights[fmt.Sprintf("%s %s %s", r.Spec.User, r.Spec.ResourceAttributes.Verb, r.Spec.ResourceAttributes.Namespace)]
	return r, nil
}

type tokenReviews struct{ *apiServer }

func (s tokenReviews) Create(ctx context.Context, r *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	if err := s.receive(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	status, ok := s.tokens[r.Spec.Token]
	if ok && (len(r.Spec.Audiences) == 0) != (len(status.Audiences) > 0) {
		r.Status = status
	}
	return r, nil
}

var (
	alice  = auth.Caller{User: "alice", Groups: []string{"devs"}, Method: auth.Token}
	create = auth.Access{Verb: "create", Group: "fast-sandbox.io", Resource: "sandboxes", Namespace: "a"}
)

// bubble runs a test on a fake clock.
func bubble(t *testing.T, test func(t *testing.T, s *apiServer, a *auth.Authorizer, tokens *auth.Tokens)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &apiServer{rights: map[string]bool{"alice create a": true}, tokens: map[string]authenticationv1.TokenReviewStatus{}}
		timing := auth.DefaultTiming()
		test(t, s, auth.NewAuthorizer(accessReviews{s}, timing, clock.RealClock{}), auth.NewTokens(tokenReviews{s}, timing, clock.RealClock{}))
		<-time.After(time.Minute) // questions whose callers have left end
	})
}

// check returns the error of a caller that may not do something.
func check(a *auth.Authorizer, ctx context.Context, c auth.Caller, what auth.Access) error {
	d, err := a.Decide(ctx, c, what)
	if err == nil && !d.Allowed {
		return auth.Denied(c, what)
	}
	return err
}

// TestCheck checks each right by itself.
func TestCheck(t *testing.T) {
	bubble(t, func(t *testing.T, _ *apiServer, a *auth.Authorizer, _ *auth.Tokens) {
		ctx := context.Background()
		require.NoError(t, check(a, ctx, alice, create))
		for name, denied := range map[string]func(c *auth.Caller, w *auth.Access){
			"another namespace": func(_ *auth.Caller, w *auth.Access) { w.Namespace = "b" },
			"all namespaces":    func(_ *auth.Caller, w *auth.Access) { w.Namespace = "" },
			"another verb":      func(_ *auth.Caller, w *auth.Access) { w.Verb = "delete" },
			"another user":      func(c *auth.Caller, _ *auth.Access) { c.User = "bob" },
		} {
			c, w := alice, create
			denied(&c, &w)
			err := check(a, ctx, c, w)
			require.Equal(t, fault.PermissionDenied, fault.ReasonOf(err), name)
			require.ErrorContains(t, err, c.User, name)
		}
	})
}

// TestDecisionsAreRemembered: a right that is taken away ends after 10 s, one that is given counts after 2 s.
func TestDecisionsAreRemembered(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, a *auth.Authorizer, _ *auth.Tokens) {
		ctx := context.Background()
		for range 100 {
			require.NoError(t, check(a, ctx, alice, create))
		}
		require.Equal(t, 1, s.count())
		s.set(func(s *apiServer) { clear(s.rights) })
		<-time.After(9 * time.Second)
		require.NoError(t, check(a, ctx, alice, create))
		<-time.After(time.Second)
		require.Error(t, check(a, ctx, alice, create))
		s.set(func(s *apiServer) { s.rights["alice create a"] = true })
		<-time.After(1900 * time.Millisecond)
		require.Error(t, check(a, ctx, alice, create))
		<-time.After(100 * time.Millisecond)
		require.NoError(t, check(a, ctx, alice, create))
		require.Equal(t, 3, s.count())
	})
}

// TestGroupsAndExtraAreTheCallers: what is remembered for a caller is not used for one of the same name with other groups.
func TestGroupsAndExtraAreTheCallers(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, a *auth.Authorizer, _ *auth.Tokens) {
		callers := []auth.Caller{
			alice, {User: "alice"}, {User: "alice", Groups: []string{"devs", "ops"}}, {User: "alice", Groups: []string{"devsops"}},
			{User: "alice", UID: "1"}, {User: "alice", Extra: map[string][]string{"scope": {"x"}}}, {User: "alice", Extra: map[string][]string{"scope": {"x", "y"}}},
			{User: "alice", Groups: []string{"", "devs"}}, {User: "alice\x00\x00devs"}, {User: "alice", UID: "\x00devs"}, {User: "5:alice"},
		}
		for range 2 {
			for _, c := range callers {
				s.set(func(s *apiServer) { s.rights[c.User+" create a"] = true })
				require.NoError(t, check(a, context.Background(), c, create))
			}
		}
		require.Equal(t, len(callers), s.count())
	})
}

// TestAPIServerIsAway: a remembered right is honored for five minutes, and everything else is refused with a delay.
func TestAPIServerIsAway(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, a *auth.Authorizer, _ *auth.Tokens) {
		ctx := context.Background()
		require.NoError(t, check(a, ctx, alice, create))
		s.set(func(s *apiServer) { s.away = true })
		for range 29 {
			<-time.After(10 * time.Second)
			require.NoError(t, check(a, ctx, alice, create))
		}
		asked := s.count()
		for range 100 {
			require.NoError(t, check(a, ctx, alice, create), "without asking for each call")
		}
		require.Equal(t, asked, s.count())
		other := create
		other.Verb = "delete"
		<-time.After(11 * time.Second)
		for _, what := range []auth.Access{create, other} {
			err := check(a, ctx, alice, what)
			require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
			_, retry := fault.RetryAfter(err)
			require.True(t, retry)
		}
		s.set(func(s *apiServer) { s.away = false })
		require.NoError(t, check(a, ctx, alice, create))
	})
}

// TestSlowAPIServer: a caller that leaves gets its own error, and does not fail those who wait with it.
func TestSlowAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, a *auth.Authorizer, _ *auth.Tokens) {
		s.set(func(s *apiServer) { s.slow = time.Second })
		short, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		other := make(chan error, 1)
		go func() { <-time.After(50 * time.Millisecond); other <- check(a, context.Background(), alice, create) }()
		err := check(a, short, alice, create)
		require.Equal(t, fault.DeadlineExceeded, fault.ReasonOf(err))
		require.NoError(t, <-other)
		require.Equal(t, 1, s.count())
		s.set(func(s *apiServer) { s.slow = time.Hour })
		begin := time.Now()
		<-time.After(10 * time.Second)
		require.NoError(t, check(a, context.Background(), alice, create), "what is remembered counts after two seconds")
		require.Equal(t, 12*time.Second, time.Since(begin))
	})
}

// TestTokens checks which tokens are accepted.
func TestTokens(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, _ *auth.Authorizer, tokens *auth.Tokens) {
		status := func(user string, audiences ...string) authenticationv1.TokenReviewStatus {
			return authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: audiences, User: authenticationv1.UserInfo{
				Username: user, UID: "1", Groups: []string{"z", "b"}, Extra: map[string]authenticationv1.ExtraValue{"k": {"v"}}}}
		}
		const account = "system:serviceaccount:a:default"
		s.tokens = map[string]authenticationv1.TokenReviewStatus{
			"ours": status(account, auth.Audience), "the API server's": status(account), "of OIDC": status("alice"),
			"of another audience": status(account, "vault"),
		}
		for token, user := range map[string]string{
			"ours": account, "of OIDC": "alice", "the API server's": "", "of another audience": "", "unknown": "", "": "", string(make([]byte, 1<<20)): "",
		} {
			c, err := tokens.Authenticate(context.Background(), token)
			if user == "" {
				require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err), token)
				continue
			}
			require.NoError(t, err, token)
			require.Equal(t, auth.Caller{User: user, UID: "1", Groups: []string{"b", "system:authenticated", "z"},
				Extra: map[string][]string{"k": {"v"}}, Method: auth.Token}, c)
		}
	})
}

// TestInvalidTokensAreBounded: a host that presents invalid tokens does not have the API server review all of them, and disturbs
// neither tokens that are remembered nor those of other hosts.
func TestInvalidTokensAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, _ *auth.Authorizer, tokens *auth.Tokens) {
		s.tokens["valid"] = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{Username: "alice"}}
		bearer := auth.NewBearer(tokens, nil, clock.RealClock{})
		bad, other := auth.WithAddress(context.Background(), "192.0.2.1:1"), auth.WithAddress(context.Background(), "192.0.2.2:1")
		_, err := bearer.Authenticate(bad, "valid")
		require.NoError(t, err)
		before := s.count()
		reasons := map[fault.Reason]int{}
		for i := range 10_000 {
			_, err := bearer.Authenticate(auth.WithAddress(context.Background(), fmt.Sprintf("192.0.2.1:%d", i)), fmt.Sprint("invalid-", i))
			reasons[fault.ReasonOf(err)]++
		}
		require.Equal(t, map[fault.Reason]int{fault.Unauthenticated: 100, fault.CallerLimitExceeded: 9_900}, reasons)
		require.Equal(t, before+200, s.count(), "two reviews for each")
		_, err = bearer.Authenticate(bad, "valid")
		require.NoError(t, err)
		_, err = bearer.Authenticate(other, "of another host")
		require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err))
		<-time.After(time.Second)
		_, err = bearer.Authenticate(bad, "invalid")
		require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err))
	})
}

// TestDeniedDoNotDisplaceAllowed: what strangers ask does not make the answers for users be forgotten.
func TestDeniedDoNotDisplaceAllowed(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, a *auth.Authorizer, _ *auth.Tokens) {
		ctx := context.Background()
		require.NoError(t, check(a, ctx, alice, create))
		for i := range auth.DefaultTiming().Size + 1 {
			what := create
			what.Namespace = fmt.Sprint("ns-", i)
			require.Error(t, check(a, ctx, alice, what))
		}
		asked := s.count()
		require.NoError(t, check(a, ctx, alice, create))
		require.Equal(t, asked, s.count())
	})
}

// TestTokenEnds: neither what is remembered nor an API server that is away prolongs a token.
func TestTokenEnds(t *testing.T) {
	bubble(t, func(t *testing.T, s *apiServer, _ *auth.Authorizer, tokens *auth.Tokens) {
		claims := fmt.Sprintf(`{"exp":%d}`, time.Now().Add(time.Minute).Unix())
		jwt := "h." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".s"
		s.tokens[jwt] = authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: []string{auth.Audience}, User: authenticationv1.UserInfo{Username: "u"}}
		_, err := tokens.Authenticate(context.Background(), jwt)
		require.NoError(t, err)
		s.set(func(s *apiServer) { s.away = true })
		<-time.After(59 * time.Second)
		_, err = tokens.Authenticate(context.Background(), jwt)
		require.NoError(t, err)
		<-time.After(time.Second)
		_, err = tokens.Authenticate(context.Background(), jwt)
		require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
	})
}

// TestCertificates: CN and O name a user, and a component is none.
func TestCertificates(t *testing.T) {
	cert := &x509.Certificate{Subject: pkix.Name{CommonName: "alice", Organization: []string{"ops", "devs", "ops"}}}
	c, ok := auth.FromCertificate(cert)
	require.True(t, ok)
	require.Equal(t, auth.Caller{User: "alice", Groups: []string{"devs", "ops", "system:authenticated"}, Method: auth.Certificate}, c)
	component := *cert
	component.URIs = []*url.URL{{Scheme: "spiffe", Host: "fast-sandbox.io", Path: "/gateway"}}
	for _, none := range []*x509.Certificate{nil, {}, &component} {
		_, ok := auth.FromCertificate(none)
		require.False(t, ok)
	}
}

func BenchmarkCachedDecision(b *testing.B) {
	s := &apiServer{rights: map[string]bool{"alice create a": true}}
	a := auth.NewAuthorizer(accessReviews{s}, auth.DefaultTiming(), clock.RealClock{})
	for b.Loop() {
		if err := check(a, context.Background(), alice, create); err != nil {
			b.Fatal(err)
		}
	}
}
