package rpc

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/fast-sandbox/fast-sandbox/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
)

// Users lets users call a server, besides the components that ServerConfig.Allow names.
type Users struct {
	// Tokens authenticates bearer tokens. *auth.Bearer implements it.
	Tokens interface {
		Authenticate(ctx context.Context, token string) (auth.Caller, error)
	}
	// Access decides what a caller may do. *auth.Authorizer implements it.
	Access interface {
		Decide(ctx context.Context, c auth.Caller, what auth.Access) (auth.Decision, error)
	}
	// Rules maps a full method (/package.Service/Method) to what a user needs for it. A method without a rule is closed to users.
	Rules map[string]Rule
	// Proxies are the roles that call on behalf of users whom they have authenticated.
	Proxies []Role
	// Limits bounds what each user may ask of the server; nil for no limits.
	Limits *limit.Limits

	audit *audit.Log // of the server
}

// Rule is what a user needs for a method.
type Rule struct {
	// Access is the verb and the resource; its namespace is that of the request.
	Access auth.Access
	// Namespace is the path of the field that has the namespace (`namespace`, `sandbox.namespace`); empty for a method of the whole
	// cluster. A request without a value asks for all namespaces.
	Namespace string
	// Name is the path of the field that names the object, for the audit log. Empty: `name`, beside the namespace.
	Name string
	// Command is the path of the list of strings that is the command which a call runs, for the audit log: it gets the first one alone. Empty:
	// the call runs none.
	Command string
	// Creates says that a call counts against how many creates a user may run at a time.
	Creates bool
	// Self says that every authenticated user may call: the answer is about the caller alone, or Check decides.
	Self bool
	// Elsewhere says that another server decides about the call, to which it is passed on, and records it.
	Elsewhere bool
	// Check, if it is set, has to allow the request, too.
	Check func(c auth.Caller, m proto.Message) error
}

// callerKey is the metadata key by which a proxy names the user on whose behalf it calls, as JSON. It counts only from a proxy.
const callerKey = "fast-sandbox-caller-bin"

// authorizationKey is the metadata key of a bearer token.
const authorizationKey = "authorization"

// IsCredential reports whether a metadata key says who calls. A proxy must not pass such a key on: the next server would take the
// caller's word for the proxy's.
func IsCredential(key string) bool { return key == authorizationKey || key == callerKey }

// authenticate returns the context of a call with its user, if a user makes it or a component makes it for one. The error is
// UNAUTHENTICATED for a call without any proof of who makes it.
func (u *Users) authenticate(ctx context.Context) (context.Context, error) {
	cert := peerCertificate(ctx)
	if role := roleOrNone(cert); role != "" {
		if !slices.Contains(u.Proxies, role) {
			return ctx, nil
		}
		c, ok, err := callerInMetadata(ctx)
		if ok {
			ctx = auth.WithCaller(ctx, c)
		}
		return ctx, err
	}
	token, ok, err := bearerToken(ctx)
	if err != nil {
		return nil, err
	}
	if ok {
		c, err := u.Tokens.Authenticate(auth.WithAddress(ctx, peerAddress(ctx)), token)
		if err != nil {
			return nil, err
		}
		c.Address = peerAddress(ctx)
		return auth.WithCaller(ctx, c), nil
	}
	if c, ok := auth.FromCertificate(cert); ok {
		c.Address = peerAddress(ctx)
		return auth.WithCaller(ctx, c), nil
	}
	return nil, unauthenticated()
}

func unauthenticated() error {
	return fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "a bearer token or a client certificate is required")
}

// open returns the rule of a method; false if users may not call it.
func (u *Users) open(method string) (Rule, bool) {
	r, ok := u.Rules[method]
	return r, ok
}

// authorize checks a request of a user, and returns why it is allowed.
func (u *Users) authorize(ctx context.Context, c auth.Caller, method string, request any) (reason string, err error) {
	rule, ok := u.open(method)
	m, isMessage := request.(proto.Message)
	switch {
	case !ok || !isMessage:
		return "", closed(c, method)
	case rule.Check != nil:
		if err := rule.Check(c, m); err != nil {
			return "", err
		}
	}
	if rule.Self || rule.Elsewhere {
		return "", nil
	}
	what := rule.Access
	if rule.Namespace != "" {
		what.Namespace = stringAt(m.ProtoReflect(), rule.Namespace)
	}
	d, err := u.Access.Decide(ctx, c, what)
	if err == nil && !d.Allowed {
		err = auth.Denied(c, what)
	}
	return d.Reason, err
}

// enter counts a call of a user against its limits until done is called.
func (u *Users) enter(ctx context.Context, method string, stream bool) (done func(), err error) {
	c, ok := auth.CallerOf(ctx)
	rule, known := u.open(method)
	switch {
	case !ok || !known:
		return func() {}, nil
	case stream:
		done, err = u.Limits.Stream(c.User)
	case rule.Creates:
		done, err = u.Limits.Create(c.User)
	default:
		return func() {}, nil
	}
	if err != nil {
		u.refused(ctx, c, method, err)
	}
	return done, err
}

func closed(c auth.Caller, method string) error {
	return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "user %q may not call %s, which only components call", c.User, method).With("user", c.User)
}

// stringAt returns the string field at a path of field names; empty if a message on the way is not set.
func stringAt(m protoreflect.Message, path string) string {
	name, rest, nested := strings.Cut(path, ".")
	field := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	switch {
	case field == nil:
		return ""
	case nested:
		return stringAt(m.Get(field).Message(), rest)
	case field.Kind() != protoreflect.StringKind || field.IsList():
		return "" // not a text of the caller's
	}
	return m.Get(field).String()
}

// commandAt returns the first string of the list at a path, and the number of all.
func commandAt(m protoreflect.Message, path string) (string, int) {
	name, rest, nested := strings.Cut(path, ".")
	field := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	switch {
	case field == nil:
		return "", 0
	case nested:
		return commandAt(m.Get(field).Message(), rest)
	case field.Kind() != protoreflect.StringKind || !field.IsList() || m.Get(field).List().Len() == 0:
		return "", 0
	}
	return m.Get(field).List().Get(0).String(), m.Get(field).List().Len()
}

// HasField reports whether a message has a string field at a path.
func HasField(m protoreflect.MessageDescriptor, path string) bool {
	name, rest, nested := strings.Cut(path, ".")
	field := m.Fields().ByName(protoreflect.Name(name))
	switch {
	case field == nil:
		return false
	case nested:
		return field.Message() != nil && HasField(field.Message(), rest)
	}
	return field.Kind() == protoreflect.StringKind && !field.IsList()
}

// bearerToken returns the token in the metadata of a call; false if there is none.
func bearerToken(ctx context.Context) (string, bool, error) {
	values := metadata.ValueFromIncomingContext(ctx, authorizationKey)
	if len(values) == 0 {
		return "", false, nil
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	if !ok || len(values) > 1 || !strings.EqualFold(scheme, "bearer") {
		return "", false, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "authorization must be one bearer token")
	}
	return strings.TrimSpace(token), true, nil
}

// ForCaller returns a context whose calls are made on behalf of the caller that ctx carries, if it carries one.
func ForCaller(ctx context.Context) context.Context {
	c, ok := auth.CallerOf(ctx)
	if !ok {
		return ctx
	}
	raw, err := json.Marshal(c)
	if err != nil { // strings always marshal
		panic(err)
	}
	return metadata.AppendToOutgoingContext(ctx, callerKey, string(raw))
}

// OnBehalf returns a connection whose calls name the user who makes them.
func OnBehalf(conn grpc.ClientConnInterface) grpc.ClientConnInterface { return onBehalf{conn} }

type onBehalf struct{ grpc.ClientConnInterface }

// Invoke implements grpc.ClientConnInterface.
func (c onBehalf) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return c.ClientConnInterface.Invoke(ForCaller(ctx), method, args, reply, opts...)
}

// NewStream implements grpc.ClientConnInterface.
func (c onBehalf) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return c.ClientConnInterface.NewStream(ForCaller(ctx), desc, method, opts...)
}

// callerInMetadata returns the user on whose behalf a proxy calls; false if the proxy calls on its own behalf.
func callerInMetadata(ctx context.Context) (c auth.Caller, ok bool, err error) {
	values := metadata.ValueFromIncomingContext(ctx, callerKey)
	if len(values) == 0 {
		return auth.Caller{}, false, nil
	}
	if len(values) > 1 || json.Unmarshal([]byte(values[0]), &c) != nil || c.User == "" {
		return auth.Caller{}, false, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "%s does not name a user", callerKey)
	}
	return c, true, nil
}

// peerCertificate returns the verified certificate of a call's peer; nil if it has presented none.
func peerCertificate(ctx context.Context) *x509.Certificate {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 {
		return nil
	}
	return info.State.PeerCertificates[0]
}

func roleOrNone(cert *x509.Certificate) Role {
	if cert == nil {
		return ""
	}
	return roleOf(cert)
}
