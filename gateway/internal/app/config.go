package app

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
)

// Config is the configuration of the gateway.
type Config struct {
	daemon.Common
	// Address to serve HTTPS on (host:port).
	Address string
	// GRPCAddress to serve gRPC on (host:port).
	GRPCAddress string
	// AllocatorAddress is the gRPC target of the allocator.
	AllocatorAddress string
	// CollectorAddress is the gRPC target of the garbage collector.
	CollectorAddress string
	// Kubeconfig is a file; empty for the Pod's own service account.
	Kubeconfig string
	// Access has the settings of authentication.
	Access auth.Options
	// Limits bounds what each user may ask for over gRPC.
	Limits limit.Options
	// AllowedOrigins are the sites whose pages may call.
	AllowedOrigins []string
	// MaxBodyBytes is the maximum size of a request body.
	MaxBodyBytes int64
	// RequestTimeout is the maximum duration of a request that asks for no shorter one. It does not apply to streams.
	RequestTimeout time.Duration
	// DrainTimeout is how long running requests may continue after the gateway begins to stop. Streams end at once.
	DrainTimeout time.Duration
}

// AddFlags adds the flags, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.Address, "bind-address", ":8080", "`address` to serve HTTPS on")
	fs.StringVar(&c.GRPCAddress, "grpc-bind-address", ":9090", "`address` to serve gRPC on")
	fs.StringVar(&c.AllocatorAddress, "allocator-address", "kubernetes:///allocator.fast-sandbox-system:9090",
		"gRPC `target` of the allocator")
	fs.StringVar(&c.CollectorAddress, "gc-address", "kubernetes:///gc.fast-sandbox-system:9090",
		"gRPC `target` of the garbage collector")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig `file`; empty: the Pod's service account")
	c.Access.AddFlags(fs)
	c.Limits.AddFlags(fs)
	fs.StringSliceVar(&c.AllowedOrigins, "allowed-origins", nil,
		"`origins` (https://HOST[:PORT]) of other sites whose pages may call, with tokens; none by default")
	fs.Int64Var(&c.MaxBodyBytes, "max-body-bytes", 4<<20, "maximum size of a request body, in `bytes`")
	fs.DurationVar(&c.RequestTimeout, "request-timeout", 70*time.Second,
		"maximum `duration` of a request that asks for no shorter one (Grpc-Timeout); does not apply to streams")
	fs.DurationVar(&c.DrainTimeout, "drain-timeout", 10*time.Second, "`duration` for which running requests may continue after the gateway begins to stop")
}

// Validate returns every problem at once, each naming its flag.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	for _, f := range []struct{ flag, value string }{
		{"bind-address", c.Address}, {"grpc-bind-address", c.GRPCAddress}, {"allocator-address", c.AllocatorAddress}, {"gc-address", c.CollectorAddress},
	} {
		if f.value == "" {
			problems = append(problems, fmt.Errorf("--%s is required", f.flag))
		}
	}
	if c.MaxBodyBytes < 1 || c.MaxBodyBytes > 64<<20 {
		problems = append(problems, fmt.Errorf("--max-body-bytes is %d, want 1 to %d", c.MaxBodyBytes, 64<<20))
	}
	if c.RequestTimeout <= 0 {
		problems = append(problems, fmt.Errorf("--request-timeout is %s, want more than 0", c.RequestTimeout))
	}
	if c.DrainTimeout < 0 {
		problems = append(problems, fmt.Errorf("--drain-timeout is %s, want 0 or more", c.DrainTimeout))
	}
	for _, o := range c.AllowedOrigins {
		u, err := url.Parse(o)
		if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") || o != u.Scheme+"://"+u.Host || strings.Contains(o, "*") {
			problems = append(problems, fmt.Errorf("--allowed-origins has %q, want https://HOST[:PORT]", o))
		}
	}
	problems = append(problems, c.Limits.Validate()...)
	return errors.Join(append(problems, c.Access.Validate()...)...)
}
