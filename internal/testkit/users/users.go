// Package users lets the servers of tests admit users without an API server. All of it may be used concurrently.
package users

import (
	"context"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Tokens are the callers by their tokens.
type Tokens map[string]auth.Caller

// Authenticate returns the caller of a token.
func (t Tokens) Authenticate(_ context.Context, token string) (auth.Caller, error) {
	c, ok := t[token]
	if !ok {
		return c, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "no such token")
	}
	return c, nil
}

// Open returns Users that may call every method of the services.
func Open(services ...*grpc.ServiceDesc) *rpc.Users {
	rules := map[string]rpc.Rule{}
	for _, s := range services {
		for _, m := range s.Methods {
			rules["/"+s.ServiceName+"/"+m.MethodName] = rpc.Rule{Self: true}
		}
		for _, m := range s.Streams {
			rules["/"+s.ServiceName+"/"+m.StreamName] = rpc.Rule{Self: true}
		}
	}
	return &rpc.Users{Tokens: Tokens{}, Access: Anything{}, Rules: rules}
}

// Anything lets every user do anything.
type Anything struct{}

// Decide implements the Access of rpc.Users.
func (Anything) Decide(context.Context, auth.Caller, auth.Access) (auth.Decision, error) {
	return auth.Decision{Allowed: true}, nil
}
