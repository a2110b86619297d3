package rpc

import (
	"context"
	"strings"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
)

// audited returns users whose calls are recorded; nil for nil.
func (u *Users) audited(log logr.Logger, r prometheus.Registerer) (*Users, error) {
	if u == nil {
		return nil, nil //nolint:nilnil // a server that users may not call
	}
	own := *u
	var err error
	own.audit, err = audit.New(log, r, clock.RealClock{})
	return &own, err
}

// refused records a call that is refused before its request is read, because of missing credentials or a limit.
func (u *Users) refused(ctx context.Context, c auth.Caller, method string, err error) {
	r := audit.Record{Caller: c, Method: method, Access: u.Rules[method].Access}
	r.Decision, r.Reason = audit.Of(err, "")
	u.audit.WriteBounded(ctx, r)
}

// record records what was decided about a request of a user. A replica that forwards a call has recorded that it allowed it.
func (u *Users) record(ctx context.Context, c auth.Caller, method string, request any, reason string, err error) {
	if err == nil && PeerRole(ctx) == RoleAllocator {
		return
	}
	rule := u.Rules[method]
	if err == nil && rule.Elsewhere {
		return
	}
	r := audit.Record{Caller: c, Method: method, Access: rule.Access}
	r.Decision, r.Reason = audit.Of(err, reason)
	if id, ok := request.(interface{ GetRequestId() string }); ok {
		r.RequestID = id.GetRequestId()
	}
	if m, ok := request.(proto.Message); ok {
		if rule.Namespace != "" {
			r.Access.Namespace = stringAt(m.ProtoReflect(), rule.Namespace)
		}
		if name := rule.name(); name != "" {
			r.Name = stringAt(m.ProtoReflect(), name)
		}
		if rule.Command != "" {
			r.Command, r.Arguments = commandAt(m.ProtoReflect(), rule.Command)
		}
	}
	u.audit.Write(ctx, r)
}

// name returns the path of the field that names the object.
func (r Rule) name() string {
	if r.Name != "" || r.Namespace == "" {
		return r.Name
	}
	return strings.TrimSuffix(r.Namespace, "namespace") + "name"
}

func peerAddress(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return p.Addr.String()
	}
	return ""
}
