package auth

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

// DefaultKeyNamespace is the namespace of the Secrets that keep API keys. It has no others, so that a right to read them is no
// right to read the keys of components.
const DefaultKeyNamespace = "fast-sandbox-apikeys"

// Options are the settings of a component that users call.
type Options struct {
	// Stale is how long an allowing answer counts while the API server does not answer.
	Stale time.Duration
	// KeyNamespace is the namespace of the Secrets that keep API keys.
	KeyNamespace string
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&o.Stale, "authorization-stale-for", DefaultTiming().Stale,
		"`duration` for which an allowing answer of the API server counts while it does not answer; 0 refuses callers at once")
	fs.StringVar(&o.KeyNamespace, "api-key-namespace", DefaultKeyNamespace, "`namespace` of the Secrets that keep API keys")
}

// Validate returns every problem, each naming its flag.
func (o *Options) Validate() []error {
	var problems []error
	if o.Stale < 0 {
		problems = append(problems, fmt.Errorf("--authorization-stale-for is %s, want 0 or more", o.Stale))
	}
	if o.KeyNamespace == "" {
		problems = append(problems, errors.New("--api-key-namespace is required"))
	}
	return problems
}

// New returns an authenticator and an authorizer that ask the API server.
func (o *Options) New(c *rest.Config, h *http.Client, clk clock.PassiveClock) (*Bearer, *Authorizer, error) {
	client, err := kubernetes.NewForConfigAndClient(c, h)
	if err != nil {
		return nil, nil, fmt.Errorf("creating the API server client: %w", err)
	}
	timing := DefaultTiming()
	timing.Stale = o.Stale
	accounts := func(namespace string) Accounts { return client.CoreV1().ServiceAccounts(namespace) }
	tokens := NewTokens(client.AuthenticationV1().TokenReviews(), timing, clk)
	keys := NewKeys(client.CoreV1().Secrets(o.KeyNamespace), accounts, timing, clk)
	return NewBearer(tokens, keys, clk), NewAuthorizer(client.AuthorizationV1().SubjectAccessReviews(), timing, clk), nil
}
