package access

import (
	"context"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/utils/clock"

	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
)

// labelNamespace, on the Secret of an API key, is the namespace of its ServiceAccount.
const labelNamespace = v1alpha1.Group + "/service-account-namespace"

// Authorizer decides what callers may do. *auth.Authorizer implements it.
type Authorizer interface {
	Decide(ctx context.Context, c auth.Caller, what auth.Access) (auth.Decision, error)
}

// Config is what a Service needs.
type Config struct {
	Authorizer Authorizer
	// Core reads ServiceAccounts and writes Secrets; KeyNamespace is the namespace of the Secrets that keep API keys.
	Core         corev1client.CoreV1Interface
	KeyNamespace string
	Clock        clock.PassiveClock
}

// Service implements authv1.AuthServiceServer.
type Service struct {
	authv1.UnimplementedAuthServiceServer
	config Config
}

// New returns the service.
func New(cfg Config) *Service { return &Service{config: cfg} }

// caller returns the user who calls. Only a server without authentication (--insecure) has calls without one.
func caller(ctx context.Context) (auth.Caller, error) {
	c, ok := auth.CallerOf(ctx)
	if !ok {
		return c, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "the call was not authenticated")
	}
	return c, nil
}

// WhoAmI implements authv1.AuthServiceServer.
func (s *Service) WhoAmI(ctx context.Context, _ *authv1.WhoAmIRequest) (*authv1.WhoAmIResponse, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	methods := map[auth.Method]authv1.Method{
		auth.Token: authv1.Method_METHOD_TOKEN, auth.Certificate: authv1.Method_METHOD_CERTIFICATE, auth.APIKey: authv1.Method_METHOD_API_KEY,
	}
	return &authv1.WhoAmIResponse{User: c.User, Uid: c.UID, Groups: c.Groups, Method: methods[c.Method]}, nil
}

// CheckAccess implements authv1.AuthServiceServer.
func (s *Service) CheckAccess(ctx context.Context, req *authv1.CheckAccessRequest) (*authv1.CheckAccessResponse, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	group := v1alpha1.Group
	if req.Group != nil {
		group = req.GetGroup()
	}
	d, err := s.config.Authorizer.Decide(ctx, c, auth.Access{
		Verb: req.GetVerb(), Group: group, Resource: req.GetResource(), Subresource: req.GetSubresource(), Namespace: req.GetNamespace(),
	})
	if err != nil {
		return nil, err
	}
	return &authv1.CheckAccessResponse{Allowed: d.Allowed, Reason: d.Reason}, nil
}

// CreateAPIKey implements authv1.AuthServiceServer.
func (s *Service) CreateAPIKey(ctx context.Context, req *authv1.CreateAPIKeyRequest) (*authv1.CreateAPIKeyResponse, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	account, err := s.config.Core.ServiceAccounts(req.GetNamespace()).Get(ctx, req.GetServiceAccount(), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, fault.New(errdefs.ErrNotFound, fault.ServiceAccountNotFound, "service account %s/%s does not exist", req.GetNamespace(), req.GetServiceAccount())
	case err != nil:
		return nil, failed(ctx, "reading the service account", err)
	}
	k := auth.Key{
		Namespace: account.Namespace, ServiceAccount: account.Name, UID: string(account.UID), Description: req.GetDescription(), Creator: c.User,
	}
	if req.GetTtl() != nil {
		k.Expires = s.config.Clock.Now().Add(req.GetTtl().AsDuration())
	}
	text, data := auth.NewKey(&k)
	secret, err := s.config.Core.Secrets(s.config.KeyNamespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: auth.SecretPrefix + k.ID, Labels: map[string]string{labelNamespace: k.Namespace}},
		Type:       auth.SecretType, Immutable: new(true), Data: data,
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, failed(ctx, "writing the Secret of the API key", err)
	}
	k.Created = secret.CreationTimestamp.Time
	return &authv1.CreateAPIKeyResponse{ApiKey: describe(k), Key: text}, nil
}

// ListAPIKeys implements authv1.AuthServiceServer.
func (s *Service) ListAPIKeys(ctx context.Context, req *authv1.ListAPIKeysRequest) (*authv1.ListAPIKeysResponse, error) {
	list, err := s.config.Core.Secrets(s.config.KeyNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: labels.Set{labelNamespace: req.GetNamespace()}.String(),
	})
	if err != nil {
		return nil, failed(ctx, "listing the Secrets of API keys", err)
	}
	response := &authv1.ListAPIKeysResponse{}
	for i := range list.Items {
		// The data counts: the label is for the selection.
		if k, ok := auth.ReadKey(&list.Items[i]); ok && k.Namespace == req.GetNamespace() {
			response.ApiKeys = append(response.ApiKeys, describe(k))
		}
	}
	slices.SortFunc(response.GetApiKeys(), func(a, b *authv1.APIKey) int {
		if n := strings.Compare(a.GetServiceAccount(), b.GetServiceAccount()); n != 0 {
			return n
		}
		if n := a.GetCreateTime().AsTime().Compare(b.GetCreateTime().AsTime()); n != 0 {
			return n
		}
		return strings.Compare(a.GetId(), b.GetId())
	})
	return response, nil
}

// RevokeAPIKey implements authv1.AuthServiceServer.
func (s *Service) RevokeAPIKey(ctx context.Context, req *authv1.RevokeAPIKeyRequest) (*authv1.RevokeAPIKeyResponse, error) {
	secrets, name := s.config.Core.Secrets(s.config.KeyNamespace), auth.SecretPrefix+req.GetId()
	secret, err := secrets.Get(ctx, name, metav1.GetOptions{})
	if err == nil {
		// The right of the caller is for one namespace: the keys of others do not exist for it.
		if k, ok := auth.ReadKey(secret); !ok || k.Namespace != req.GetNamespace() {
			return &authv1.RevokeAPIKeyResponse{}, nil
		}
		err = secrets.Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(secret.UID))})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, failed(ctx, "deleting the Secret of the API key", err)
	}
	return &authv1.RevokeAPIKeyResponse{}, nil
}

func describe(k auth.Key) *authv1.APIKey {
	out := &authv1.APIKey{
		Id: k.ID, Namespace: k.Namespace, ServiceAccount: k.ServiceAccount, Description: k.Description, CreatedBy: k.Creator,
		CreateTime: timestamppb.New(k.Created),
	}
	if !k.Expires.IsZero() {
		out.ExpireTime = timestamppb.New(k.Expires)
	}
	return out
}

// failed is the error of a call of the API server.
func failed(ctx context.Context, doing string, err error) error {
	if ctx.Err() != nil {
		return fault.FromContext(ctx, doing, err)
	}
	return apiserver.Unavailable(err)
}
